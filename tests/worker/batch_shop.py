"""Batches from file to files with a test's own hands: what it needs of keeper, store and rows."""

import json
from dataclasses import dataclass, field

from jobs import batches, claims, file_store, files, finishing
from jobs.batch_record import BatchRecord, BatchState
from jobs.database import Database
from jobs.files import FileRecord
from jobs.finishing import JobResult
from jobs.lifecycle import JobState
from jobs.settings import Settings
from worker.batch_keeper import BatchKeeper

TENANT = "acme"


@dataclass
class Shop:
    settings: Settings
    database: Database
    keeper: BatchKeeper
    store: file_store.FileStore
    kept: list[BatchKeeper] = field(default_factory=list)

    def call(self, function, *args, **kwargs):
        with self.database.begin() as connection:
            return function(connection, *args, **kwargs)

    @property
    def now(self) -> float:
        return self.call(self.database.clock)

    def turn(self) -> None:
        while self.keeper.round():
            pass

    def another_keeper(self) -> BatchKeeper:
        self.kept.append(BatchKeeper(self.settings))
        return self.kept[-1]

    def upload(self, data: bytes) -> str:
        incoming, file_id = self.store.incoming(), files.new_file_id()
        incoming.write(data)
        incoming.keep(file_id)
        record = FileRecord(
            id=file_id, tenant_id=TENANT, filename="rows.jsonl", purpose="batch",
            bytes=len(data), created_at=self.now, expires_at=None,
        )  # fmt: skip
        self.call(files.add, record)
        return file_id

    def create(self, data: bytes, *, window_s=86_400.0, **limits) -> str:
        batch_id = batches.new_batch_id()
        record = BatchRecord(
            id=batch_id, tenant_id=TENANT, endpoint="/v1/completions",
            input_file_id=self.upload(data), metadata=None, priority=-5, output_ttl_s=None,
            state=BatchState.VALIDATING, created_at=self.now, expires_at=self.now + window_s,
            **limits,
        )  # fmt: skip
        self.call(batches.create, record)
        return batch_id

    def get(self, batch_id: str) -> BatchRecord:
        return self.call(batches.get, batch_id, tenant=TENANT, now=self.now)

    def cancel(self, batch_id: str) -> BatchRecord:
        return self.call(batches.cancel, batch_id, tenant=TENANT, now=self.now)

    def rows(self, batch_id: str):
        return self.call(batches.rows_after, batch_id, tenant=TENANT, after=-1, limit=10_000)

    def run(self, batch_id: str, *, first=0, num=10_000, state=JobState.SUCCEEDED) -> int:
        """End so many queued rows, as a worker does."""
        ids = [r.id for r in self.rows(batch_id) if r.state == JobState.QUEUED][first:][:num]
        claimed = self.call(claims.claim, ids, worker_id="w1", now=self.now)
        error = None
        if state == JobState.FAILED:
            error = {"message": "no", "type": "server_error", "param": None, "code": "poisoned"}
        results = [
            JobResult(
                id=job.id, fence=job.fence, state=state, error=error,
                output=None if error else {"text": job.body["prompt"]},
                prompt_tokens=3, completion_tokens=0 if error else 2,
            )
            for job in claimed
        ]  # fmt: skip
        assert len(self.call(finishing.finish, results, now=self.now)) == len(ids)
        return len(ids)

    def lines(self, file_id: str | None) -> list[dict]:
        if file_id is None:
            return []
        with self.store.open(file_id) as file:
            data = file.read()
        assert data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]

    def files(self) -> list[str]:
        return sorted(path.name for path in self.store.folder.iterdir())


def row(i: int, **body) -> bytes:
    body = {"model": "tiny", "prompt": f"prompt {i}", "max_tokens": 4} | body
    line = {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def data(num: int) -> bytes:
    return b"".join(row(i) for i in range(num))
