"""OpenTelemetry traces: from the call that brought a job to the steps of the engine that ran it.

The caller's context comes as the header `traceparent` (W3C Trace Context) of a call or of a Celery
message. It goes into the job's row and into the message of its id, and is the parent of what the
worker tells of the job when it has ended: its wait, its prefill, its decode. Ids, counts and times
only: no prompt and no output is in a span.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT says where spans go: then nothing is imported, and there is
no `Tracing`. Spans leave in batches, on a thread of their own; a collector that is away loses them,
and holds up nobody.
"""

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from jobs.settings import Settings, SettingsError

CLOSE_MS = 2000
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
current: ContextVar[str | None] = ContextVar("traceparent", default=None)  # of the call we are in


class Tracing:
    """Makes this process's spans. Thread-safe."""

    def __init__(self, exporter: Any, service: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tokenmill")

    def begin(
        self,
        name: str,
        *,
        parent: str | None = None,  # a traceparent; an odd one is none
        at: float | None = None,  # seconds since 1970; None: now
        attributes: Mapping[str, Any] | None = None,
        server: bool = False,
    ) -> Any:
        """A span, to be given to `end`."""
        from opentelemetry.trace import SpanKind

        return self._tracer.start_span(
            name,
            context=_context(parent),
            kind=SpanKind.SERVER if server else SpanKind.INTERNAL,
            start_time=None if at is None else _ns(at),
            attributes=dict(attributes or {}),
        )

    def end(self, span: Any, *, at: float | None = None, failed: bool = False) -> None:
        from opentelemetry.trace import StatusCode

        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(None if at is None else _ns(at))

    def close(self) -> None:
        """Send what waits, as far as there is time."""
        self._provider.force_flush(CLOSE_MS)
        self._provider.shutdown()


def open_tracing(settings: Settings, service: str) -> Tracing | None:
    """None where no traces are asked for. Raises SettingsError without the packages for them."""
    if not settings.otlp_endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise SettingsError(
            "OTEL_EXPORTER_OTLP_ENDPOINT", "needs packages: pip install 'tokenmill[otel]'"
        ) from None
    exporter = OTLPSpanExporter(endpoint=f"{settings.otlp_endpoint.rstrip('/')}/v1/traces")
    return Tracing(exporter, service)


def traceparent(span: Any) -> str:
    """As a header or a row carries it."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def well_formed(parent: object) -> str | None:
    """A traceparent as it came from elsewhere; None where it is not one."""
    return parent if isinstance(parent, str) and _PARENT.fullmatch(parent) else None


def _context(parent: str | None) -> Any:
    """OpenTelemetry's own of a traceparent; an empty one makes a root, whatever is around."""
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )  # fmt: skip

    found = _PARENT.fullmatch(parent or "")
    if found is None:
        return Context()
    remote = SpanContext(
        trace_id=int(found[1], 16),
        span_id=int(found[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
