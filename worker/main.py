"""One worker in this process, as `tokenmill worker` runs it."""

import warnings
from dataclasses import replace
from typing import Any

from celery.exceptions import SecurityWarning

from jobs.settings import ModelEntry, Settings
from worker.application import make_worker_app, queues_of
from worker.progress import Progress


def run_worker(
    settings: Settings,
    model: ModelEntry | None = None,
    *,
    concurrency: int | None = None,  # sequences in one step
    name: str | None = None,  # of the Celery node
    progress: Progress | None = None,  # who hears how the start goes
) -> int:
    """Serve until a signal says stop; the exit code. Call it on the main thread.

    The same as `celery -A worker.app worker --without-gossip --without-mingle` with the model's
    queues. Not 0 when the worker could not start, or broke.
    """
    if concurrency is not None:
        settings = replace(settings, max_num_seqs=concurrency)
    model = model or settings.models[0]
    # it warns of pickle, which this application refuses
    warnings.filterwarnings("ignore", category=SecurityWarning)
    worker: Any = make_worker_app(settings, model, progress).Worker(
        hostname=name,
        queues=queues_of(model),
        loglevel=settings.log_level.upper(),
        without_gossip=True,
        without_mingle=True,
        quiet=True,
    )
    worker.start()
    return int(worker.exitcode or 0)
