"""Routes: which function answers a path, and what it is given.

Starlette's own routing, without a layer for each call on top: a function's parameters are looked at
once, when its module is imported. It may ask for `request`, `services`, `tenant` and what its path
has in braces.
"""

import functools
import inspect
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from api.services import services_of, tenant_of

F = TypeVar("F", bound=Callable[..., Awaitable[Response]])

_GIVEN: dict[str, Callable[[Request], Any]] = {
    "request": lambda request: request,
    "services": services_of,
    "tenant": tenant_of,
}
_IN_PATH = re.compile(r"\{(\w+)(?::\w+)?\}")


class Router:
    """A module's routes, in the order they are tried."""

    def __init__(self) -> None:
        self.routes: list[Route] = []

    def get(self, path: str) -> Callable[[F], F]:
        return self._add("GET", path)

    def post(self, path: str) -> Callable[[F], F]:
        return self._add("POST", path)

    def delete(self, path: str) -> Callable[[F], F]:
        return self._add("DELETE", path)

    def _add(self, method: str, path: str) -> Callable[[F], F]:
        def add(function: F) -> F:
            route = Route(path, Endpoint(function, path), methods=[method])
            route.methods = {method}  # Starlette answers HEAD wherever there is GET
            self.routes.append(route)
            return function

        return add


class Endpoint:
    """Calls a function with what it asks for, and sends its response."""

    def __init__(self, function: Callable[..., Awaitable[Response]], path: str) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        asked = set(inspect.signature(function).parameters)
        self._in_path = set(_IN_PATH.findall(path))
        self._given = [(name, _GIVEN[name]) for name in asked - self._in_path]
        assert self._in_path <= asked, f"{path} has what its function does not ask for"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        values = {name: find(request) for name, find in self._given}
        response = await self._function(**values, **scope["path_params"])
        await response(scope, receive, send)
