"""A request's bytes to jobs that may be accepted: JSON, the envelope, the door check."""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from api.door import Door, bound_of
from api.envelope import Envelope, read_envelope
from api.errors import BadRequest, BodyTooLarge
from api.pool import Pool
from api.together import Together
from jobs import openai, strict_json
from jobs.lifecycle import RETRIED
from jobs.records import NewJob, new_job_id
from jobs.settings import Settings
from jobs.streams import StreamMode

R = TypeVar("R")

SMALL_BYTES = 8192
MAX_TOGETHER = 64
MAX_WAITING = 1024
_OPTION = re.compile(r"(?:(?:\[[0-9]+\]\.)?body\.)?(\w+)")


class Intake:
    """Checks small bodies together: in one turn of a thread all that have come by then.

    A large one takes a thread for itself, so that small ones do not wait for it.
    """

    def __init__(self, cpu: Pool) -> None:
        self._cpu = cpu
        self._together: Together[Callable[[], Any], Any] = Together(
            cpu.name,
            self._check,
            max_items=MAX_TOGETHER,
            max_waiting=MAX_WAITING,
            timeout_s=cpu.timeout_s,
        )

    async def __call__(self, raw: bytes, check: Callable[[], R]) -> R:
        """What `check` makes of the body. Raises what it raises, Overloaded and Unavailable."""
        if len(raw) > SMALL_BYTES:
            return await self._cpu.run(check)
        checked: R = await self._together(check)
        return checked

    async def _check(self, checks: Sequence[Callable[[], Any]]) -> list[Any]:
        return await self._cpu.run(_each, checks)


def _each(checks: Sequence[Callable[[], Any]]) -> list[Any]:
    done = []
    for check in checks:
        try:
            done.append(check())
        except Exception as error:  # noqa: BLE001 - its caller raises it
            done.append(error)
    return done


def parse_json(raw: bytes) -> Any:
    """Raises BadRequest."""
    try:
        return strict_json.loads(raw)
    except strict_json.JSONError as error:
        option = _OPTION.fullmatch(error.path) if error.of_number else None
        bound = bound_of(option[1]) if option else None
        message = f"{error}; {bound}" if bound else str(error)
        raise BadRequest(message, param=error.path or None, code="invalid_json") from None


def new_job(value: object, num_bytes: int, door: Door, settings: Settings) -> NewJob:
    """A line of a batch, with what a queue needs. Raises BadRequest, BodyTooLarge."""
    check_size(num_bytes, settings)
    envelope = read_envelope(value)
    try:
        return job_of(envelope, door, settings)
    except BadRequest as error:
        error.param = f"body.{error.param}" if error.param else "body"
        raise


def job_of(
    envelope: Envelope,
    door: Door,
    settings: Settings,
    *,
    stream: StreamMode | None = None,
    resolved: bool = False,  # what the body names instead of giving it is in it by now
) -> NewJob:
    """Raises BadRequest, whose `param` is a path inside the body."""
    earlier = "previous_response_id"
    if envelope.url == openai.RESPONSES and envelope.body.get(earlier) and not resolved:
        message = f"{earlier} is not supported for jobs: give the input itself"
        raise BadRequest(message, param=earlier, code="unsupported_parameter")
    checked = door.check(envelope.url, envelope.body, streams=stream is not None)
    return NewJob(
        id=new_job_id(),
        custom_id=envelope.custom_id,
        url=envelope.url,
        model=checked.model,
        body=envelope.body,
        priority=envelope.priority,
        max_attempts=envelope.max_attempts or settings.max_attempts,
        retry_on=RETRIED if envelope.retry_on is None else envelope.retry_on,
        deadline_s=envelope.deadline_s,
        metadata=envelope.metadata,
        stream=stream,
        prompt_tokens=checked.prompt_tokens,
        max_tokens=checked.max_tokens,
    )


def check_size(num_bytes: int, settings: Settings) -> None:
    if num_bytes > settings.max_job_bytes:
        raise BodyTooLarge(
            f"a job may have at most {settings.max_job_bytes} bytes, got {num_bytes}"
        )


def dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(value: object) -> bytes:
    """Of the parsed body, so that spaces and the order of keys don't count."""
    return hashlib.sha256(dump(value)).digest()
