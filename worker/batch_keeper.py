"""Looks after batches: reads their files, makes rows of them, closes them. A thread of the sweeper,
which takes away files whose time is over, too.

Any number of keepers may run. A batch is one keeper's at a time, for as long as it writes; every
step is a transaction that names its keeper and the state it comes from, and can be done again by
another. Batches take turns, so that a large one keeps no small one waiting. Files are made under
names of their own, and become the batch's in the transaction that closes it: what a keeper that
died has made is a stray, which the sweeper removes.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import BinaryIO, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from jobs import batch_progress, batch_rows, batches, quotas, store
from jobs.batch_record import BatchRecord, BatchState
from jobs.batch_rows import BatchRow
from jobs.batches import LostBatch
from jobs.database import Database, transient, trouble
from jobs.earlier_rows import earlier
from jobs.events import Channel, Publisher
from jobs.file_store import FileStore
from jobs.lines import read_lines
from jobs.settings import Settings
from worker.batch_closer import close
from worker.batch_copies import COPIES, copied
from worker.batch_plan import Plan
from worker.batch_reader import Reading, add_to, line_at, row_of
from worker.file_sweeper import FileSweeper

R = TypeVar("R")

MAX_BATCHES = 256  # that one keeper has at once
LINES = 2000  # read in one turn
ROWS = 1000  # inserted in one transaction
STOP_S = 5.0
COUNTED_FROM = 10_000  # rows of a batch; then at each doubling the database counts its table
LIMITS_EVERY_S = 1.0  # is counted whether a batch has reached one
LIMITS_SHARE = 10  # and no sooner than this many times what the counting took
AGAIN_S = 5.0  # after a round that failed

logger = logging.getLogger(__name__)


class BatchKeeper:
    """Begins as a thread, or is turned by `round`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.store = FileStore(settings.files_dir)
        self.name = f"keeper-{uuid.uuid4().hex}"
        self._database = Database(settings.database_url, pool_size=1)
        self._files = FileSweeper(settings, self._database)
        self._publisher = Publisher(settings)
        self._works: dict[str, Iterator[None]] = {}  # by batch: what is being done for it
        self._look_at: dict[str, float] = {}  # batches with limits, when next: monotonic
        self._plans: dict[str, Plan] = {}  # of batches that were read, until their rows are in
        self._resting: dict[str, float] = {}  # batches that failed, until when: monotonic
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._away = False
        self._schema_known = False
        self._now = 0.0  # by the database, when this round began
        self._moved = False  # some batch is in another state since

    def __enter__(self) -> "BatchKeeper":
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
        self._works.clear()
        while self._plans:
            self._plans.popitem()[1].close()
        self._publisher.close()
        self._database.dispose()

    def _run(self) -> None:
        pause_s = self.settings.sweep_s
        while not self._stop.wait(pause_s):
            pause_s = self.settings.sweep_s
            try:
                while self.round() and not self._stop.is_set():
                    pass
                self._files.sweep()
                self._away = False
            except store.WrongSchema:
                return  # the sweeper finds it too, says so and ends
            except Exception as error:  # the edge of this thread: recorded, and begun again
                if not transient(error):
                    logger.exception("batches failed")
                elif not self._away:
                    logger.warning("batches wait: %s", trouble(error))
                self._away = True
                pause_s = max(pause_s, AGAIN_S)
        self.let_go()

    def let_go(self) -> None:
        try:
            self.write(lambda connection, now: batches.let_go(connection, self.name))
        except Exception as error:  # what it is, too, time will take care of it
            if not transient(error):
                raise

    def round(self) -> bool:
        """One turn for each batch; whether there is more to do at once."""
        mine, self._moved = self.write(self._take), False
        now = time.monotonic()
        self._resting = {each: until for each, until in self._resting.items() if until > now}
        self._works = {
            batch.id: self._works.get(batch.id) or self._work(batch)
            for batch in mine
            if batch.id not in self._resting
        }
        open_ids = {batch.id for batch in mine}
        self._look_at = {each: at for each, at in self._look_at.items() if each in open_ids}
        for batch_id in self._plans.keys() - open_ids:
            self._plans.pop(batch_id).close()
        busy = False
        for batch_id, work in list(self._works.items()):
            try:
                next(work)
                busy = True
            except StopIteration:
                del self._works[batch_id]
            except LostBatch:
                logger.info("batch %s let go: another's, or cancelled", batch_id)
                self._moved = True
                del self._works[batch_id]
            except OSError as error:
                logger.warning("batch %s waits: %s", batch_id, error.strerror)
                self._rest(batch_id)
            except Exception as error:  # a fault of ours in this one: the others go on
                if transient(error):
                    raise
                logger.exception("batch %s failed, and is tried again", batch_id)
                self._rest(batch_id)
        return busy or self._moved

    def _rest(self, batch_id: str) -> None:
        del self._works[batch_id]
        if (plan := self._plans.pop(batch_id, None)) is not None:
            plan.close()
        self._resting[batch_id] = time.monotonic() + AGAIN_S

    def write(self, statement: Callable[[Connection, float], R]) -> R:
        with self._database.begin() as connection:
            return statement(connection, self._database.clock(connection))

    def read(self, statement: Callable[[Connection, float], R]) -> R:
        with self._database.read() as connection:
            return statement(connection, self._database.clock(connection))

    def _take(self, connection: Connection, now: float) -> list[BatchRecord]:
        if not self._schema_known:
            store.need_schema(connection)
            self._schema_known = True
        self._now = now
        return batches.take_open(connection, self.name, now=now, limit=MAX_BATCHES)

    def _work(self, batch: BatchRecord) -> Iterator[None]:
        """What the batch needs now, turn by turn; nothing where its rows are still to be run."""
        if batch.state == BatchState.VALIDATING:
            yield from self._validate(batch)
        elif batch.num_inserted < batch.num_rows:
            yield from self._insert(batch)
        elif batch.state == BatchState.IN_PROGRESS:
            self._finalize(batch)
        elif batch.ending == BatchState.COMPLETED:
            yield from close(self, batch)
        else:
            yield from self._end_rows(batch)
            yield from close(self, batch)

    def _move(self, statement: Callable[[Connection, float], None]) -> None:
        self.write(statement)
        self._moved = True

    def _validate(self, batch: BatchRecord) -> Iterator[None]:
        opened = self._open(batch)
        if opened is None:
            return
        with opened as file, ExitStack() as unless_kept:
            reading = Reading(file, batch, self.settings, self._new_plan())
            unless_kept.callback(reading.plan.close)
            while reading.step(LINES):
                if self._is_over(batch):
                    return
                self._keep(batch)
                yield
            self._move(lambda connection, now: self._validated(connection, now, batch, reading))
            unless_kept.pop_all()
            self._plans[batch.id] = reading.plan
        logger.info(
            "batch %s read: rows=%d errors=%d", batch.id, reading.num_rows, len(reading.errors)
        )

    def _validated(
        self, connection: Connection, now: float, batch: BatchRecord, reading: Reading
    ) -> None:
        errors = reading.errors
        if not errors:
            try:
                promised = batches.num_promised(connection, tenant=batch.tenant_id)
                quotas.check_queued(connection, batch.tenant_id, reading.num_rows, promised)
            except quotas.QuotaExceeded as error:
                errors = [{"code": error.quota, "line": None, "message": str(error), "param": None}]
        if errors:
            batches.refuse(connection, batch, self.name, errors, now=now)
            return
        values = {
            "state": BatchState.IN_PROGRESS, "ending": BatchState.COMPLETED,
            "in_progress_at": now, "num_rows": reading.num_rows, "model": reading.model,
            "num_same": reading.plan.num_same,
        }  # fmt: skip
        batches.keep(connection, batch, self.name, now=now, values=values)

    def _insert(self, batch: BatchRecord) -> Iterator[None]:
        opened = self._open(batch)
        if opened is None:
            return
        with opened as file:
            if batch.id not in self._plans:  # another keeper's was lost with it
                yield from self._plan_again(file, batch)
            plan = self._plans[batch.id]
            assert plan.num_rows == batch.num_rows, f"the file of {batch.id} is another by now"
            while batch.num_inserted < batch.num_rows:
                if self._is_over(batch):
                    return
                rows = self._next_rows(file, batch, plan)
                if not rows:
                    return  # they wait for the results of others
                further = self.write(partial(self._insert_some, batch, rows))
                self._count(batch.num_inserted, further.num_inserted)
                batch = further
                yield
        self._plans.pop(batch.id).close()
        self._moved = True

    def _plan_again(self, file: BinaryIO, batch: BatchRecord) -> Iterator[None]:
        with ExitStack() as unless_kept:
            plan = self._new_plan()
            unless_kept.callback(plan.close)
            for line in read_lines(file, self.settings.max_job_bytes, blanks=True):
                if line.data:
                    add_to(plan, batch, plan.num_rows, line)
                if line.number % LINES == 0:
                    self._keep(batch)
                    yield
            unless_kept.pop_all()
            self._plans[batch.id] = plan

    def _new_plan(self) -> Plan:
        return Plan(planned=self.settings.batch_order == "planned")

    def _next_rows(self, file: BinaryIO, batch: BatchRecord, plan: Plan) -> list[BatchRow]:
        max_bytes = self.settings.max_job_bytes
        places = plan.take(batch.num_inserted, ROWS)
        rows = [
            row_of(batch.endpoint, line_at(file, max_bytes, each.start), each.number)
            for each in takewhile(lambda each: each.previous is None, places)
        ]
        if not rows:
            copies = places[:COPIES]
            numbers = [each.previous for each in copies if each.previous is not None]
            found = self.read(lambda connection, now: earlier(connection, batch, numbers))
            rows = copied(file, batch, copies, found, max_bytes=max_bytes)
        return rows

    def _insert_some(
        self, batch: BatchRecord, rows: list[BatchRow], connection: Connection, now: float
    ) -> BatchRecord:
        further = replace(batch, num_inserted=batch.num_inserted + len(rows))
        values = {"num_inserted": further.num_inserted}
        batches.keep(connection, batch, self.name, now=now, values=values)
        batch_rows.insert_rows(
            connection, batch, rows, now=now, max_attempts=self.settings.max_attempts
        )
        return further

    def _count(self, before: int, num_inserted: int) -> None:
        before, after = before // COUNTED_FROM, num_inserted // COUNTED_FROM
        if before.bit_length() == after.bit_length():
            return
        try:
            self.write(lambda connection, now: batch_rows.know_size(connection))
        except DBAPIError as error:  # rows are in all the same, and it counts by itself, too
            logger.info("jobs not counted: %s", trouble(error))

    def _finalize(self, batch: BatchRecord) -> None:
        """Once the last row has ended, or a limit is reached."""
        if self.read(lambda connection, now: batches.num_open(connection, batch)):
            self._is_over(batch)
            return

        def write(connection: Connection, now: float) -> None:
            values = {"state": BatchState.FINALIZING, "finalizing_at": now}
            batches.keep(connection, batch, self.name, now=now, values=values)

        self._move(write)

    def _is_over(self, batch: BatchRecord) -> bool:
        """Whether it has come to one of its limits just now; then it is on its way to its end."""
        if batch.state not in (BatchState.VALIDATING, BatchState.IN_PROGRESS):
            return False
        if self._now >= batch.expires_at:
            self._move(
                lambda connection, now: batches.expire(connection, batch, self.name, now=now)
            )
            return True
        if batch.token_budget is None and batch.max_error_rate is None:
            return False
        began = time.monotonic()
        if began < self._look_at.get(batch.id, 0.0):
            return False
        found = self.read(
            lambda connection, now: batch_progress.progress(connection, batch, now=now)
        )
        took_s = time.monotonic() - began
        self._look_at[batch.id] = began + max(LIMITS_EVERY_S, LIMITS_SHARE * took_s)
        reason = batch_progress.limit_reached(batch, found)
        if reason is None:
            return False
        self._move(
            lambda connection, now: batches.stop(connection, batch, self.name, reason, now=now)
        )
        logger.info("batch %s stopped: %s", batch.id, reason)
        return True

    def _end_rows(self, batch: BatchRecord) -> Iterator[None]:
        while True:
            ended, running = self.write(
                lambda connection, now: self._end_some(connection, now, batch)
            )
            self._publisher.publish(Channel.CANCELLED, running)
            if not ended:
                return
            yield

    def _end_some(
        self, connection: Connection, now: float, batch: BatchRecord
    ) -> tuple[int, list[str]]:
        batches.keep(connection, batch, self.name, now=now)
        return batches.end_rows(connection, batch, now=now)

    def _keep(self, batch: BatchRecord) -> None:
        self.write(lambda connection, now: batches.keep(connection, batch, self.name, now=now))

    def _open(self, batch: BatchRecord) -> BinaryIO | None:
        """The batch's file; the batch is refused where there is none."""
        try:
            return self.store.open(batch.input_file_id)
        except FileNotFoundError:
            message = f"the file {batch.input_file_id} is not there any more"
            error = {"code": "file_not_found", "line": None, "message": message, "param": None}
            self.write(
                lambda connection, now: batches.refuse(
                    connection, batch, self.name, [error], now=now
                )
            )
            return None
