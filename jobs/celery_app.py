"""The Celery application: how ids of jobs travel. Its tasks are run by the worker's own pool.

The message is never the job: Redis may lose or double it, and the row decides. So messages are
acknowledged as soon as the claim has committed, no result is kept in Redis, and nothing is delayed
by Celery. Each setting that departs from Celery's default says which accident it prevents.
"""

import hashlib
import re
from typing import Any

from celery import Celery
from kombu import Queue

from jobs.redis_client import CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S, broker_url
from jobs.settings import Settings

DEFAULT_QUEUE = "tokenmill"  # every worker listens to it, whatever its model
RUN_TASK = "tokenmill.run"  # args [job id]; the task's id is the job's
CHUNK_TASK = "tokenmill.chunk"  # args [[job id, ...]]: up to CHUNK_ROWS of them, in order
CHUNK_ROWS = 32
BACKGROUND_STEP = 9  # kombu's priority of what nobody waits for: a list of its own, taken last
GENERATE_TASK = "tokenmill.generate"  # kwargs are one job as POST /v1/jobs takes it

_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class WrongPool(RuntimeError):
    """A task of ours was executed by a pool that is not the engine's."""


def queue_for(model: str) -> str:
    """The queue of a model's ids."""
    return f"{DEFAULT_QUEUE}.{model}"


def job_id_of(task_id: str) -> str:
    """The job that a generate task's id names: another one for each id, whatever is in it.

    A UUID, as Celery makes them, is kept without its dashes. Any other text may have characters
    that no row's id has, or too many of them: of it come 48 hex digits, which are nobody else's.
    """
    if _UUID.fullmatch(task_id):
        return "job_" + task_id.replace("-", "")
    return "job_" + hashlib.sha256(task_id.encode(errors="surrogatepass")).hexdigest()[:48]


def make_app(settings: Settings) -> Celery:
    """An application for this deployment; connects to nothing yet."""
    app = Celery("tokenmill", broker=broker_url(settings.redis_url), set_as_current=False)
    app.conf.update(_configuration(settings))
    for name in (RUN_TASK, CHUNK_TASK, GENERATE_TASK):
        app.task(name=name, shared=False, bind=True)(_refuse)
    return app


def quick_connection(app: Celery) -> Any:
    """A kombu connection for sending that fails within three seconds and does not retry.

    The application's own waits out a Redis that is away: right for a worker, wrong for an API.
    """
    return app.connection_for_write(
        transport_options={
            "socket_timeout": REPLY_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "retry_on_timeout": False,
            "max_retries": 0,
        }
    )


def _refuse(task: Any, *_args: Any, **_kwargs: Any) -> None:
    raise WrongPool(f"{task.name} runs in worker.pool:EnginePool only: start `tokenmill worker`")


def _configuration(settings: Settings) -> dict[str, Any]:
    queues = [DEFAULT_QUEUE, *(queue_for(model.name) for model in settings.models)]
    return {
        "task_queues": [Queue(name, routing_key=name) for name in queues],
        "task_default_queue": DEFAULT_QUEUE,
        # results are rows; Celery's own would grow in Redis and race with them
        "result_backend": None,
        "task_ignore_result": True,
        "task_store_errors_even_if_ignored": False,
        # pickle lets whoever writes to Redis run code here
        "accept_content": ["json"],
        "result_accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        # the pool accepts, and thereby acknowledges, once the claim has committed
        "task_acks_late": False,
        "task_reject_on_worker_lost": False,  # a job that kills its worker would come back for ever
        # take a message only when the pool has a place for it: nothing is hoarded
        "worker_disable_prefetch": True,
        "worker_prefetch_multiplier": 1,
        # a blip of Redis must not abort every running job
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_enable_remote_control": True,  # revoke and inspect are features
        "worker_send_task_events": False,
        "broker_connection_timeout": 3,
        "broker_connection_retry_on_startup": True,  # start order does not matter
        "broker_connection_max_retries": None,  # the default gives up after 100 tries
        "broker_channel_error_retry": True,  # else any error reply of Redis ends the worker
        "broker_transport_options": {
            "global_keyprefix": settings.key_prefix,
            # a message is unacknowledged for milliseconds; what a killed worker had is back soon
            "visibility_timeout": 60,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            # without these a half-open connection is never noticed
            "socket_timeout": 10,
            "socket_connect_timeout": 3,
            "socket_keepalive": True,
            "health_check_interval": 5,
            "retry_on_timeout": True,
        },
        "task_publish_retry_policy": {
            "max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5,
        },
    }  # fmt: skip
