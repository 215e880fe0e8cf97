"""A span for each call, under its caller's: around everything else, where traces are asked for."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.tracing import Tracing, current, traceparent

HEADER = b"traceparent"


class Traced:
    """Jobs that the call submits have its span for their parent."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self.app = app
        self.tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == HEADER]
        parent = given[0].decode("latin-1") if len(given) == 1 else None
        span = self.tracing.begin(scope["method"], parent=parent, server=True)
        token = current.set(traceparent(span))
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            current.reset(token)
            if (route := scope.get("route")) is not None:  # never the path itself: it has ids
                span.update_name(f"{scope['method']} {route.path}")
                span.set_attribute("http.route", route.path)
            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("http.response.status_code", status)
            self.tracing.end(span, failed=status >= 500)
