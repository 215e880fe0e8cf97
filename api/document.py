"""The OpenAPI document of this API: every route with what it takes and what it answers.

`python -m api.document` prints it. It is served, at /openapi.json, only by a deployment that asks
for it (TOKENMILL_OPENAPI): who attacks a service should have to guess its routes.
"""

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from starlette.routing import BaseRoute, Route

from api.core import MAX_KEY_CHARACTERS
from api.document_bodies import bodies, ref
from api.document_replies import REPLIES
from api.guard import OPEN_PATHS, needed_scope
from api.query import Reader
from api.routes import admin, batch_rows, batches, dead, files, jobs, responses, stored, webhooks
from jobs import openai

PATH = "/openapi.json"
_JSON = "application/json"
_EVENTS = "text/event-stream"
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")

# what may keep any call that is let in from its answer
_ALWAYS = {400: "it must be changed: `param` says where", 500: "a fault of ours"}
_GUARDED = {401: "no key, or none that is known", 403: "the key may not do this"}
_SQL = {429: "too much at once", 503: "try again after `Retry-After` seconds"}
_BODY = {408: "the body came too slowly", 413: "the body is too large"}
_NOT_FOUND = {404: "there is none of this id"}
_METHOD = {405: "`Allow` says what this path takes"}
_KEYED = {409: "the `Idempotency-Key` was used with another body"}
_WAITS = {
    404: "no such model, or what was waited for was deleted",
    504: "the job's deadline came first",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one method of one path takes and answers; names are those of schemas."""

    reply: str
    status: int = 200
    body: str | None = None
    body_media: str = _JSON
    query: Mapping[str, Reader] = field(default_factory=dict)
    media: Collection[str] = (_JSON,)  # of the reply
    keyed: bool = False  # takes an Idempotency-Key
    waits: bool = False  # for a job's end
    makes: str | None = None  # the path parameter that takes the `id` of what it answers
    more: Mapping[int, str] = field(default_factory=dict)  # other replies: schemas by status


_BOTH = (_JSON, _EVENTS)
_FORM = "multipart/form-data"
_HOOK = "/v1/webhook_endpoints"
_HOOKS = f"{_HOOK}/{{endpoint_id}}"
_CHAT = openai.CHAT + "/{completion_id}"
_ANSWER = openai.RESPONSES + "/{response_id}"
_FILE = "/v1/files/{file_id}"
_BATCH = "/v1/batches/{batch_id}"
OPERATIONS = {
    ("POST", "/v1/jobs"): Operation(
        reply="JobOrJobs", makes="job_id", status=202, body="NewJobs", keyed=True
    ),
    ("GET", "/v1/jobs"): Operation(reply="JobPage", query=jobs.LIST_QUERY),
    ("GET", "/v1/jobs/{job_id}"): Operation(reply="Job", query=jobs.GET_QUERY),
    ("GET", "/v1/jobs/{job_id}/events"): Operation(reply="Events", media=(_EVENTS,)),
    ("POST", "/v1/jobs/{job_id}/cancel"): Operation(reply="Job"),
    ("POST", openai.CHAT): Operation(
        reply="ChatCompletion",
        body="ChatBody",
        media=_BOTH,
        keyed=True,
        waits=True,
        makes="completion_id",
    ),
    ("GET", openai.CHAT): Operation(reply="StoredPage", query=stored.LIST_QUERY),
    ("GET", _CHAT): Operation(reply="StoredCompletion"),
    ("POST", _CHAT): Operation(reply="StoredCompletion", body="Labels"),
    ("DELETE", _CHAT): Operation(reply="StoredDeleted"),
    ("GET", f"{_CHAT}/messages"): Operation(reply="MessagePage", query=stored.PAGE_QUERY),
    ("POST", openai.COMPLETIONS): Operation(
        reply="Completion", body="CompletionBody", media=_BOTH, keyed=True, waits=True
    ),
    ("POST", openai.RESPONSES): Operation(
        reply="Response",
        makes="response_id",
        body="ResponseBody",
        media=_BOTH,
        keyed=True,
        waits=True,
    ),
    ("GET", _ANSWER): Operation(reply="Response", query=responses.GET_QUERY, media=_BOTH),
    ("DELETE", _ANSWER): Operation(reply="ResponseDeleted"),
    ("POST", f"{_ANSWER}/cancel"): Operation(reply="Response"),
    ("GET", f"{_ANSWER}/input_items"): Operation(reply="InputItems", query=responses.ITEMS_QUERY),
    ("POST", f"{openai.RESPONSES}/input_tokens"): Operation(
        reply="InputTokens", body="ResponseBody", more={404: "Error"}
    ),
    ("POST", "/v1/files"): Operation(
        reply="File", makes="file_id", body="Upload", body_media=_FORM
    ),
    ("GET", "/v1/files"): Operation(reply="FilePage", query=files.LIST_QUERY),
    ("GET", _FILE): Operation(reply="File"),
    ("GET", f"{_FILE}/content"): Operation(reply="Content", media=("application/octet-stream",)),
    ("DELETE", _FILE): Operation(reply="FileDeleted"),
    ("POST", "/v1/batches"): Operation(
        reply="Batch", body="NewBatch", keyed=True, makes="batch_id"
    ),
    ("GET", "/v1/batches"): Operation(reply="BatchPage", query=batches.LIST_QUERY),
    ("GET", _BATCH): Operation(reply="Batch"),
    ("POST", f"{_BATCH}/cancel"): Operation(reply="Batch"),
    ("GET", f"{_BATCH}/results"): Operation(reply="Rows", query=batch_rows.RESULTS_QUERY),
    ("POST", f"{_BATCH}/pause"): Operation(reply="Batch"),
    ("POST", f"{_BATCH}/resume"): Operation(reply="Batch"),
    ("POST", f"{_BATCH}/retry_failed"): Operation(reply="Batch", more={409: "Error"}),
    ("GET", "/v1/models"): Operation(reply="Models"),
    ("GET", "/v1/models/{model_id}"): Operation(reply="Model"),
    ("GET", "/health/live"): Operation(reply="Live"),
    ("GET", "/health/ready"): Operation(reply="Ready", more={503: "Ready"}),
    ("GET", "/metrics"): Operation(reply="Metrics", media=("text/plain",)),
    ("POST", _HOOK): Operation(reply="EndpointWithSecret", makes="endpoint_id", body="NewEndpoint"),
    ("GET", _HOOK): Operation(reply="Endpoints", query=webhooks.LIST_QUERY),
    ("GET", "/v1/webhook_event_types"): Operation(reply="EventTypes"),
    ("GET", _HOOKS): Operation(reply="Endpoint"),
    ("POST", _HOOKS): Operation(reply="Endpoint", body="EndpointChanges"),
    ("DELETE", _HOOKS): Operation(reply="EndpointDeleted"),
    ("POST", f"{_HOOKS}/rotate_secret"): Operation(reply="EndpointWithSecret"),
    ("POST", f"{_HOOKS}/test"): Operation(reply="Delivery", makes="delivery_id"),
    ("GET", f"{_HOOKS}/deliveries"): Operation(reply="Deliveries", query=webhooks.DELIVERIES_QUERY),
    ("POST", f"{_HOOKS}/deliveries/{{delivery_id}}/redeliver"): Operation(
        reply="Delivery", status=202
    ),
    ("POST", "/admin/v1/tenants"): Operation(
        reply="Tenant", makes="tenant_id", status=201, body="NewTenant"
    ),
    ("GET", "/admin/v1/tenants"): Operation(reply="Tenants"),
    ("POST", "/admin/v1/tenants/{tenant_id}"): Operation(reply="Tenant", body="QuotaFields"),
    ("POST", "/admin/v1/keys"): Operation(
        reply="KeyMade", status=201, body="NewKey", makes="key_id", more={404: "Error"}
    ),
    ("GET", "/admin/v1/keys"): Operation(reply="Keys", query=admin.KEYS_QUERY),
    ("DELETE", "/admin/v1/keys/{key_id}"): Operation(reply="Key"),
    ("GET", "/admin/v1/dead_jobs"): Operation(reply="DeadJobs", query=dead.LIST_QUERY),
    ("POST", "/admin/v1/dead_jobs/requeue"): Operation(reply="Requeued", body="Requeue"),
    ("GET", PATH): Operation(reply="Document"),
}


def document(
    routes: Collection[BaseRoute], models: Collection[str], *, asks_for_keys: bool
) -> dict[str, Any]:
    """Of an application with these routes that serves these models."""
    paths: dict[str, Any] = {}
    for method, path, name in served(routes):
        if (method, path) in OPERATIONS:
            paths.setdefault(path, {})[method.lower()] = _operation(method, path, name)
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Tokenmill", "version": version("tokenmill")},
        "paths": paths,
        "components": {"schemas": REPLIES | bodies(sorted(models))},
    }
    if asks_for_keys:
        described["security"] = [{"key": []}]
        key = {"type": "http", "scheme": "bearer"}
        described["components"]["securitySchemes"] = {"key": key}
    return described


def served(routes: Collection[BaseRoute]) -> Iterator[tuple[str, str, str]]:
    """Method, path as OpenAPI writes it, and a name, of each."""
    for route in routes:
        assert isinstance(route, Route), route
        for method in sorted(route.methods or ()):
            module = route.endpoint.__module__.rpartition(".")[2]
            yield method, _PARAMETER.sub(r"{\1}", route.path), f"{module}.{route.name}"


def _operation(method: str, path: str, name: str) -> dict[str, Any]:
    operation = OPERATIONS[method, path]
    described: dict[str, Any] = {
        "operationId": name,
        "parameters": list(_parameters(path, operation)),
        "responses": _responses(path, operation),
    }
    if operation.body is not None:
        content = {operation.body_media: {"schema": ref(operation.body)}}
        described["requestBody"] = {"required": True, "content": content}
    if path in OPEN_PATHS:
        described["security"] = []
    else:
        described["description"] = f"A key needs the scope {needed_scope(method, path)}."
    return described


def _parameters(path: str, operation: Operation) -> Iterator[dict[str, Any]]:
    for name in _names(path):
        yield {"in": "path", "name": name, "required": True, "schema": {"type": "string"}}
    for name, reader in operation.query.items():
        style = {"style": "deepObject", "explode": True} if reader.deep else {}
        yield {"in": "query", "name": name, "schema": dict(reader.schema), **style}
    if operation.keyed:
        # what HTTP clients can send as a header at all, and no more of it than is read
        schema = {"type": "string", "pattern": f"^[!-~]{{1,{MAX_KEY_CHARACTERS}}}$"}
        yield {"in": "header", "name": "idempotency-key", "schema": schema}


def _responses(path: str, operation: Operation) -> dict[str, Any]:
    errors = dict(_ALWAYS) | _METHOD
    if path not in OPEN_PATHS:
        errors |= _GUARDED | _SQL
    if _names(path):
        errors |= _NOT_FOUND
    if operation.body is not None:
        errors |= _BODY
    if operation.keyed:
        errors |= _KEYED
    if operation.waits:
        errors |= _WAITS
    replies = {
        str(status): _reply(meaning, ref("Error"), (_JSON,)) for status, meaning in errors.items()
    }
    good = {operation.status: operation.reply, **operation.more}
    for status, schema in good.items():
        replies[str(status)] = _reply(schema, ref(schema), operation.media)
    if operation.makes is not None:
        replies[str(operation.status)]["links"] = _links(path, operation.makes)
    return dict(sorted(replies.items()))


def _links(path: str, makes: str) -> dict[str, Any]:
    """To what can be done with the id in the reply."""
    known = {name: f"$request.path.{name}" for name in _names(path)}
    known[makes] = "$response.body#/id"
    return {
        re.sub(r"\W+", "_", f"{method}{theirs}").strip("_"): {
            "operationRef": f"#/paths/{theirs.replace('/', '~1')}/{method.lower()}",
            "parameters": {f"path.{name}": known[name] for name in _names(theirs)},
        }
        for method, theirs in OPERATIONS
        if makes in _names(theirs) and set(_names(theirs)) <= set(known)
    }


def _names(path: str) -> list[str]:
    return [name for name, _ in _PARAMETER.findall(path)]


def _reply(meaning: str, schema: dict[str, Any], media: Collection[str]) -> dict[str, Any]:
    header = {"required": True, "schema": {"type": "string", "pattern": "^req_[0-9a-f]{32}$"}}
    return {
        "description": meaning,
        "headers": {"x-request-id": header},
        "content": {
            each: {"schema": ref("Events") if each == _EVENTS else schema} for each in media
        },
    }


if __name__ == "__main__":
    from api.app import ROUTES

    every = [route for module in ROUTES for route in module.router.routes]
    json.dump(document(every, ["MODEL"], asks_for_keys=True), sys.stdout, indent=2)
    sys.stdout.write("\n")
