"""The Celery application of a worker: the deployment's, with our pool and one model's queues."""

from celery import Celery
from kombu import Queue

from jobs.celery_app import DEFAULT_QUEUE, make_app, queue_for
from jobs.settings import ModelEntry, Settings
from worker.pool import pool_for
from worker.progress import Progress


def make_worker_app(
    settings: Settings, model: ModelEntry, progress: Progress | None = None
) -> Celery:
    """The deployment's application, with our pool and the queues of one model."""
    app = make_app(settings)
    app.conf.update(
        worker_pool=pool_for(settings, model, progress or Progress()),
        broker_transport="worker.transport:Transport",
        # only a ceiling: the pool says how many it can take; `celery worker -c` may lower it
        worker_concurrency=2 * settings.max_num_seqs,
        task_queues=[Queue(name, routing_key=name) for name in queues_of(model)],
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
    )
    return app


def queues_of(model: ModelEntry) -> list[str]:
    """A model's own ids, and the jobs that Celery clients send whole."""
    return [queue_for(model.name), DEFAULT_QUEUE]
