"""The worker for `celery -A worker.app worker`: settings from the environment.

It serves the first of the models in TOKENMILL_MODELS; `tokenmill worker --model` serves another.
"""

import atexit
import gc

from jobs import logs
from jobs.settings import Settings
from worker.application import make_worker_app

atexit.register(gc.freeze)  # an exit need not look through all objects once more: a second or two
settings = Settings.from_env()
if settings.log_format == "json":  # else Celery has lines of its own
    logs.set_up(settings)
app = make_worker_app(settings, settings.models[0])
