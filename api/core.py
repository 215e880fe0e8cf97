"""What every endpoint does with a job: accept it, wait for it, follow its tokens, let go of it.

A call that waits for its answer is a job like any other. Endpoints translate; nothing of a job's
life is decided anywhere else.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection
from starlette.requests import ClientDisconnect, Request

from api.acceptance import Accepted
from api.errors import ApiError, BadRequest, Conflict, NotFound, Overloaded, Unavailable
from api.feed import Transcript
from api.query import read_header
from api.services import Services
from jobs import store, tracing
from jobs.lifecycle import ErrorCode, JobState
from jobs.records import JobRecord, NewJob
from jobs.streams import Run, StreamMode
from jobs.submissions import Submission

logger = logging.getLogger(__name__)

JOB_ID = re.compile(r"job_[0-9A-Za-z_-]{1,100}")
MAX_KEY_CHARACTERS = 255
LET_GO_TRIES = 60  # LOOK_S apart, where the database is away
LOOK_S = 5.0  # between two looks at the row of a job that is followed and says nothing


def idempotency_key(request: Request) -> str | None:
    key = read_header(request, "idempotency-key")
    if key is not None and not (1 <= len(key) <= MAX_KEY_CHARACTERS and key.isascii()):
        raise BadRequest(
            f"idempotency-key must have 1 to {MAX_KEY_CHARACTERS} ASCII characters, got {len(key)}",
            param="idempotency-key",
        )
    return key


def refuse_key(request: Request) -> None:
    """For a call that does something anew each time. Raises BadRequest: who gives a key relies on
    its being kept to."""
    if idempotency_key(request) is not None:
        raise BadRequest(
            "idempotency-key is not supported for this call: repeated, it is done again",
            param="idempotency-key",
            code="unsupported_parameter",
        )


async def accept(
    services: Services,
    new_jobs: Sequence[NewJob],
    *,
    tenant: str,
    key: str | None,
    body_sha256: bytes,
    keep: bool = True,  # else they end with their caller
) -> Accepted:
    """Accept all of them or none. Raises Conflict."""
    if not keep and (waiter := services.lease.name) is not None:
        new_jobs = [replace(job, waiter_id=waiter) for job in new_jobs]
    if (parent := tracing.current.get()) is not None:
        new_jobs = [replace(job, trace_parent=parent) for job in new_jobs]
    submission = Submission(tenant=tenant, new_jobs=new_jobs, key=key, body_sha256=body_sha256)
    try:
        accepted = await services.acceptance(submission)
    except store.IdempotencyConflict:
        raise key_conflict() from None
    if len(accepted.records) < len(new_jobs):
        raise Conflict(
            "jobs of this Idempotency-Key's first call have been deleted since",
            param="idempotency-key",
            code="job_deleted",
        )
    services.hints.submitted()
    if accepted.records and not accepted.replayed:
        first = accepted.records[0]
        logger.info("job %s accepted: url=%s jobs=%d", first.id, first.url, len(new_jobs))
    return accepted


def key_conflict() -> Conflict:
    return Conflict(
        "this Idempotency-Key was used with another body",
        param="idempotency-key",
        code="idempotency_conflict",
    )


async def cancel(services: Services, tenant: str, job_id: str) -> JobRecord | None:
    """The job, cancelled unless it had ended; None where there is none."""

    def write(connection: Connection, now: float) -> JobRecord | None:
        return store.cancel(connection, job_id, tenant=tenant, now=now)

    record = await services.sql.write(write)
    if record is not None:
        services.hints.cancelled([job_id])
    return record


async def find(services: Services, tenant: str, job_id: str) -> JobRecord | None:
    def read(connection: Connection, now: float) -> JobRecord | None:
        return store.get(connection, job_id, tenant=tenant)

    return await services.sql.read(read)


async def results(
    services: Services, request: Request, accepted: Sequence[JobRecord], *, keep: bool
) -> list[JobRecord]:
    """The jobs, once all have succeeded. Those that are not to be kept end with their caller.

    Raises what `failure` says of the first that did not, ClientDisconnect, Unavailable at
    shutdown, NotFound where one was deleted.
    """
    records: list[JobRecord] = []
    try:
        async with disconnected(request) as gone:
            for each in accepted:
                record = await _ended(services, each, gone)
                if record.output is None:
                    raise failure(record)
                records.append(record)
            return records
    finally:
        if not keep and len(records) < len(accepted):
            let_go(services, accepted[len(records) :])


async def _ended(services: Services, job: JobRecord, gone: "asyncio.Task[None]") -> JobRecord:
    with services.waiters.register(job.id) as ended:
        gone.add_done_callback(lambda _: ended.set())
        while not gone.done():
            record = await find(services, job.tenant_id, job.id)
            if record is None:
                raise NotFound("the job was deleted meanwhile", code="job_not_found")
            if record.ended:
                return record
            if services.waiters.closing:
                raise Unavailable("the service is shutting down", code="shutting_down")
            await services.waiters.sleep(ended, services.settings.sync_s)
    raise ClientDisconnect


@contextlib.asynccontextmanager
async def disconnected(request: Request) -> AsyncIterator["asyncio.Task[None]"]:
    """A task that is done when the client has gone: its place is then for others."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(gone())
    try:
        yield task
    finally:
        task.cancel()


def let_go(services: Services, records: Sequence[JobRecord]) -> None:
    """Cancel jobs that nobody waits for any more, whatever becomes of the call that asked."""

    async def work(record: JobRecord) -> None:
        for _ in range(LET_GO_TRIES):
            try:
                await cancel(services, record.tenant_id, record.id)
            except (Overloaded, Unavailable) as error:
                logger.warning("job %s goes on without its caller: %s", record.id, error.message)
                await asyncio.sleep(LOOK_S)
            else:
                return

    async def work_off() -> None:
        for record in records:
            await work(record)

    if records:
        services.background(work_off())


@dataclass(frozen=True, slots=True)
class News:
    """What was learnt of a job that is followed: its newest row, and what its tokens say."""

    record: JobRecord
    runs: list[Run]


class _End(asyncio.Event):
    """Set where the job may have ended; wakes who waits for its tokens, too."""

    def __init__(self, wakes: asyncio.Event) -> None:
        super().__init__()
        self._wakes = wakes

    def set(self) -> None:
        super().set()
        self._wakes.set()


async def follow(services: Services, record: JobRecord) -> AsyncGenerator[News]:
    """Every token's piece once and in order, and the row whenever it was looked at.

    Ends when the job has, and then its ended row comes last; or when the process shuts down. Of a
    job whose stream is not kept, pieces may be missing. Raises Overloaded, NotFound where it was
    deleted.
    """
    transcript, loop, wake = Transcript(), asyncio.get_running_loop(), asyncio.Event()
    job_id, end = record.id, _End(wake)
    with services.waiters.register(job_id, end), services.feed.register(job_id, wake) as listener:
        is_new = record.attempt == 0 and not record.ended
        if not is_new and not record.ended:
            await services.feed.recall(listener, job_id)
        all_pieces = not is_new
        look_at = loop.time() + (LOOK_S if is_new else 0.0)
        while True:
            wake.clear()
            runs = transcript.add(listener.take())
            looks = end.is_set() or loop.time() >= look_at
            if looks:
                end.clear()
                with contextlib.suppress(Unavailable):  # the stream outlives a database's restart
                    record, kept = await _look(services, record, transcript, all_pieces=all_pieces)
                    runs += transcript.add(listener.take() + kept)
                    all_pieces = False
                look_at = loop.time() + LOOK_S
            if runs or looks:
                yield News(record, runs)
            if record.ended or services.waiters.closing:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(look_at):
                    await wake.wait()


async def follow_all(
    services: Services, records: Sequence[JobRecord]
) -> AsyncIterator[tuple[int, News]]:
    """What `follow` says of each, as it comes, with the job's place among them."""
    if len(records) == 1:
        async for news in follow(services, records[0]):
            yield 0, news
        return
    followed = [follow(services, record) for record in records]
    coming = {asyncio.ensure_future(anext(each)): i for i, each in enumerate(followed)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = coming.pop(task)
                try:
                    news = task.result()
                except StopAsyncIteration:
                    continue
                coming[asyncio.ensure_future(anext(followed[place]))] = place
                yield place, news
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for each in followed:
            await each.aclose()


async def _look(
    services: Services, record: JobRecord, transcript: Transcript, *, all_pieces: bool
) -> tuple[JobRecord, list[Run]]:
    """The row of now, and where tokens are missed what the row has of them. Raises NotFound."""
    tenant = record.tenant_id
    seen = await find(services, tenant, record.id)
    if seen is not None and seen.stream == StreamMode.KEPT:
        missed = transcript.waits or (
            seen.ended
            and not (
                seen.state == JobState.SUCCEEDED and transcript.num_tokens >= seen.completion_tokens
            )
        )
        if all_pieces or missed:
            found = await services.sql.read(
                lambda connection, _: store.streamed(connection, seen.id, tenant=tenant)
            )
            if found is not None:
                return found
    if seen is None:
        raise NotFound("the job was deleted meanwhile", code="job_not_found")
    return seen, []


def failure(record: JobRecord) -> ApiError:
    """What a call is told whose job has ended without a result."""
    if record.state == JobState.CANCELLED:
        return Conflict("the job was cancelled", code="cancelled")
    assert record.error is not None
    told = {name: record.error[name] for name in ("message", "param", "code")}
    error: ApiError
    if record.error["type"] == BadRequest.type:
        error = BadRequest(told["message"], param=told["param"], code=told["code"])
    elif record.error["code"] == ErrorCode.COMPILER_BUSY:
        return Unavailable(told["message"], param=told["param"], code=told["code"])
    else:
        error = ApiError(told["message"], param=told["param"], code=told["code"])
        error.status = 504 if record.state == JobState.EXPIRED else 500
    error.headers["x-should-retry"] = "false"  # it was tried as often as it may be
    return error
