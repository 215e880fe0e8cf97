"""What stands around a job that came whole in a message, made fit for Celery, which trusts it.

Celery takes a header's type for granted and raises where it is another, mostly long after it took
the message. So our tasks' headers are read before Celery sees them: one that is wrong is left out,
and told by the row that the job becomes. Header fields are those of Celery's message protocol 2.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from celery.utils.time import maybe_iso8601

from jobs.celery_app import CHUNK_TASK, GENERATE_TASK, RUN_TASK
from jobs.lifecycle import ErrorCode
from jobs.tracing import well_formed
from worker.generation import Refusal

FAULT = "tokenmill_fault"  # a header of our own: what was wrong with the others
# what a client asks of Celery that nobody does here: the answer is a row, not a message
CALLBACKS = {"callbacks": "link", "errbacks": "link_error", "chain": "chain", "chord": "chord"}

_KINDS: dict[str, type] = {
    **dict.fromkeys(("lang", "root_id", "parent_id", "group", "shadow", "origin"), str),
    **dict.fromkeys(("argsrepr", "kwargsrepr", "meth", "eta", "expires"), str),
    **dict.fromkeys(("retries", "group_index", "replaced_task_nesting"), int),
    **{"timelimit": list, "stamped_headers": list, "stamps": dict},
}
_NAMES = {str: "text", int: "an integer", list: "a list", dict: "an object"}


def tidy(message: object) -> None:
    """Change headers of a message as it came from Redis so that Celery can work with them."""
    headers = message.get("headers") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(headers, dict):
        return
    task = headers.get("task")
    if not isinstance(task, str) or task not in (RUN_TASK, CHUNK_TASK, GENERATE_TASK):
        return
    headers.pop(FAULT, None)
    faults = []
    task_id = headers.get("id")
    if not isinstance(task_id, str) or not task_id:
        faults.append(f"id must be a text, got {_kind(task_id) if task_id != '' else 'none'}")
        headers["id"] = _stand_in(task_id, message)
    for name, kind in _KINDS.items():
        if (value := headers.get(name)) is not None and (fault := _fault(name, kind, value)):
            faults.append(fault)
            del headers[name]
    if faults:
        headers[FAULT] = faults[0]


def refusal_of(request: Mapping[str, Any], embed: object) -> Refusal | None:
    """What is wrong with a message around its job: its headers, or what it wants called."""
    if (fault := request.get(FAULT)) is not None:
        return Refusal(ErrorCode.INVALID_REQUEST, f"the message's header {fault}")
    if not isinstance(embed, dict):
        return Refusal(
            ErrorCode.INVALID_REQUEST,
            f"the message's third part must be an object, got {_kind(embed)}",
        )
    asked = [option for name, option in CALLBACKS.items() if embed.get(name)]
    if not asked:
        return None
    return Refusal(
        ErrorCode.INVALID_REQUEST,
        f"{', '.join(asked)}: no task is called when a job ends; ask for its row",
        param=asked[0],
    )


def trace_parent_in(request: Mapping[str, Any]) -> str | None:
    """The trace that a message belongs to, as its sender's instrumentation says; an odd one is
    none, and no fault of the job's."""
    return well_formed(request.get("traceparent"))


def _fault(name: str, kind: type, value: object) -> str | None:
    if not isinstance(value, kind):
        return f"{name} must be {_NAMES[kind]}, got {_kind(value)}"
    if name in ("eta", "expires"):
        assert isinstance(value, str)
        return None if _is_time(value) else f"{name} must be a time in ISO 8601"
    if name == "timelimit" and isinstance(value, list) and len(value) != 2:
        return f"timelimit must have 2 elements, got {len(value)}"
    if isinstance(value, list) and name == "stamped_headers":
        odd = [each for each in value if not isinstance(each, str)]
        return f"{name} must be a list of texts, got {_kind(odd[0])} in it" if odd else None
    return None


def _is_time(text: str) -> bool:
    """Whether Celery can count seconds until then, in any time zone."""
    try:
        time = maybe_iso8601(text)
        return time is None or (1971 <= time.year <= 9998 and math.isfinite(time.timestamp()))
    except (ValueError, OverflowError, TypeError, AttributeError):
        return False


def _stand_in(task_id: object, message: Mapping[str, Any]) -> str:
    """An id for a message whose own is none: the same again if the message comes again."""
    text = json.dumps([task_id, message.get("body")], sort_keys=True)
    return f"no id: {hashlib.sha256(text.encode()).hexdigest()}"


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__
