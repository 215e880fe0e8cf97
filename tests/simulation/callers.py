"""The other processes of a simulated deployment: sweepers, and clients with the API they call."""

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import worker.sweeper
from jobs import store
from jobs.lifecycle import RETRIED, TERMINAL, JobState
from jobs.records import NewJob
from jobs.runway import RunwayDown
from jobs.settings import ModelEntry, Settings
from jobs.tenants import DEFAULT_TENANT
from tests.simulation.audit import Spec
from tests.simulation.processes import MODEL, Process
from tests.simulation.servers import Silence, SimDatabase, SimRunway

SETTINGS = Settings(models=(ModelEntry(name=MODEL, path="nowhere"),), runway=3, republish_s=1.0)
SWEEP_S = 2.0  # seldom: half of a run is the making of its statements


class SweeperProcess(Process):
    """The product's sweeper."""

    def __init__(self, world: Any, name: str, skew_s: float) -> None:
        super().__init__(kind="sweeper", name=name, skew_s=skew_s)
        self._world = world
        self._due = world.now
        with (
            patch.object(worker.sweeper, "Database", lambda *_, **__: SimDatabase(world, self)),
            patch.object(worker.sweeper, "Runway", lambda s, _: SimRunway(s, world.messages)),
            patch.object(worker.sweeper, "Publisher", Silence),
            patch.object(worker.sweeper, "make_app", lambda _: None),
        ):
            self._sweeper = worker.sweeper.Sweeper(SETTINGS)

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        return [("sweeper", self._sweep)] if self._world.now >= self._due else []

    def _sweep(self) -> None:
        self._due = self._world.now + SWEEP_S
        self._sweeper.sweep()


class ClientProcess(Process):
    """Clients and the API they call: submits, retries, looks and cancels."""

    def __init__(self, world: Any, specs: list[Spec]) -> None:
        super().__init__(kind="api", name="api")
        self._world = world
        self._database = SimDatabase(world, self)
        self._runway = SimRunway(SETTINGS, world.messages)
        self._to_submit = list(specs)
        self._to_cancel = [spec for spec in specs if world.rng.random() < 0.4]
        self._num_ids = 0
        self.ids: dict[str, str] = {}  # by key, once accepted
        self._seen: dict[str, JobState] = {}

    def actions(self) -> list[tuple[str, Callable[[], None]]]:
        found: list[tuple[str, Callable[[], None]]] = []
        if self._to_submit:
            found.append(("client", self._submit))
        if self.ids and self._world.chance(0.1):
            found.append(("client", self._look))
        if any(spec.key in self.ids for spec in self._to_cancel) and self._world.chance(0.2):
            found.append(("client", self._cancel))
        return found

    def _submit(self) -> None:
        spec = self._to_submit[0]
        self._num_ids += 1
        job = NewJob(
            id=f"job_{spec.key}_{self._num_ids}",
            url="/v1/completions",
            model=MODEL,
            body={"prompt": [spec.prompt], "n": spec.n, "max_tokens": spec.max_tokens},
            custom_id=spec.key,
            max_attempts=spec.max_attempts,
            retry_on=(*RETRIED, "numerical_error") if spec.tries_failures else RETRIED,
            priority=spec.priority,
            deadline_s=spec.deadline_s,
            prompt_tokens=1,
            max_tokens=spec.max_tokens,
        )
        try:
            with self._database.begin() as connection:
                submitted = store.submit(
                    connection,
                    [job],
                    tenant=DEFAULT_TENANT,
                    now=self._database.clock(connection),
                    key=spec.key,
                    body_sha256=sha256(repr(spec).encode()).digest(),
                    ttl_s=1e6,
                )
        except worker.sweeper.SQLAlchemyError:
            return  # 503: the client comes again, with its key
        (record,) = submitted.records
        self._to_submit.pop(0)
        self.ids[spec.key] = record.id
        self._world.accepted.add(record.id)
        with suppress(RunwayDown, worker.sweeper.SQLAlchemyError):
            self._runway.refill(self._database)

    def _look(self) -> None:
        job_id = self._world.rng.choice(sorted(self.ids.values()))
        try:
            with self._database.read() as connection:
                record = store.get(connection, job_id, tenant=DEFAULT_TENANT)
        except worker.sweeper.SQLAlchemyError:
            return
        assert record is not None, f"{job_id} was accepted and is not found"
        before = self._seen.setdefault(job_id, record.state)
        assert before not in TERMINAL or record.state is before, f"{job_id} came back to life"
        self._seen[job_id] = record.state

    def _cancel(self) -> None:
        spec = next(spec for spec in self._to_cancel if spec.key in self.ids)
        try:
            with self._database.begin() as connection:
                now = self._database.clock(connection)
                record = store.cancel(
                    connection, self.ids[spec.key], tenant=DEFAULT_TENANT, now=now
                )
        except worker.sweeper.SQLAlchemyError:
            return
        self._to_cancel.remove(spec)
        assert record is not None
        assert record.ended, f"{record.id} was cancelled and is {record.state}"
        self._seen[record.id] = record.state
