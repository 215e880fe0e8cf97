"""Puts a worker together from its parts, and takes it apart again. The only place that wires them.

StartError
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from engine.chat_template import ChatTemplateError
from engine.config import EngineConfig
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import TokenizerError
from jobs import store
from jobs.database import Database
from jobs.events import Channel, Publisher, Subscription
from jobs.records import WorkerInfo
from jobs.retries import Backoff
from jobs.settings import ModelEntry, Settings
from jobs.streams import StreamWriter
from jobs.tracing import open_tracing
from worker.dispatcher import Dispatcher
from worker.engine_client import EngineClient, EngineEvents, EngineStartError
from worker.lease import LeaseKeeper
from worker.ledger import Ledger
from worker.progress import Progress
from worker.traces import Traces
from worker.watchdog import Watchdog

HINT_PAUSE_S = 5.0  # after one that Redis did not take
STREAM_S = 1.0  # at the end, for tokens that wait to be told

logger = logging.getLogger(__name__)


class StartError(Exception):
    """The worker cannot run here; the message says what is missing."""


class Parts:
    """One worker's engine, ledger, lease and dispatcher."""

    def __init__(
        self,
        settings: Settings,
        model: ModelEntry,
        *,
        worker_id: str,
        max_jobs: int,
        wake: Callable[[], None],
        progress: Progress,
    ) -> None:
        """Raises StartError when the model's folder cannot be read."""
        self._settings = settings
        self._model = model
        self._worker_id = worker_id
        self._progress = progress
        self._lease: LeaseKeeper | None = None
        self._announce_at = 0.0
        tokenizer = _load_tokenizer(model)
        self._publisher = Publisher(settings)
        self._stream = StreamWriter(settings)
        self._cancelled = Subscription(settings, Channel.CANCELLED)
        self._database = Database(settings.database_url, pool_size=settings.database_pool)
        self.engine = EngineClient(
            engine_config(settings, model),
            log_level=settings.log_level,
            log_format=settings.log_format,
        )
        self.ledger = Ledger(
            self._database,
            worker_id=worker_id,
            window_s=settings.ledger_window_ms / 1000,
            max_rows=settings.ledger_rows,
            max_crashes=settings.max_crashes,
            backoff=Backoff(base_s=settings.retry_base_s, most_s=settings.retry_most_s),
            announce=self._announce,
        )
        self._tracing = open_tracing(settings, "tokenmill-worker")
        self.dispatcher = Dispatcher(
            model=model.name,
            tokenizer=tokenizer,
            post=self.ledger.post,
            send=self.engine.send,
            wake=wake,
            tell=self._stream.send,
            max_jobs=max_jobs,
            max_crashes=settings.max_crashes,
            trace=None if self._tracing is None else Traces(self._tracing).tell,
        )
        self._watchdog = Watchdog(
            dispatcher=self.dispatcher, engine=self.engine, stall_s=settings.stall_s
        )

    def start(self, poll: Callable[[], None]) -> None:
        """Load the model, then open the lease; `poll` runs meanwhile and may raise.

        Raises StartError.
        """
        events = EngineEvents(
            on_ready=self.dispatcher.engine_ready,
            on_stepped=self.dispatcher.engine_stepped,
            on_died=self.dispatcher.engine_died,
            on_loading=self._progress.phase,
        )
        try:
            ready = self.engine.start(events, poll)
        except EngineStartError as error:
            raise StartError(f"model {self._model.name}: {error}") from error
        self._lease = LeaseKeeper(
            self._database,
            info=WorkerInfo(
                id=self._worker_id,
                hostname=socket.gethostname(),
                pid=os.getpid(),
                model=self._model.name,
                max_num_seqs=ready.max_num_seqs,
                kv_tokens=ready.kv_tokens,
                max_model_len=ready.max_model_len,
            ),
            dispatcher=self.dispatcher,
            engine=self.engine,
            cancelled=self._cancelled,
            beat_s=self._settings.beat_s,
            lease_s=self._settings.lease_s,
            stalled=lambda: self._watchdog.stalled,
        )
        try:
            self._lease.start(poll)
        except SQLAlchemyError as error:
            kind = type(getattr(error, "orig", None) or error).__name__
            raise StartError(f"the database cannot be used ({kind})") from error
        except store.WrongSchema as error:
            raise StartError(str(error)) from error
        self.ledger.start()
        self.dispatcher.start()
        self._stream.start()
        self._watchdog.start()

    def stop(self) -> None:
        """Whatever is still held is left to the lease, which ends now."""
        self._watchdog.stop()
        self.engine.stop()
        self.ledger.stop()
        if self._lease is not None:
            self._lease.stop()
        self._stream.close(STREAM_S)
        if self._tracing is not None:
            self._tracing.close()
        self._publisher.close()
        self._database.dispose()

    def _announce(self, ids: Collection[str]) -> None:
        """A hint may be lost. A Redis that hangs must not hold up the ledger at every commit."""
        if time.monotonic() >= self._announce_at and not self._publisher.publish(
            Channel.ENDED, ids
        ):
            self._announce_at = time.monotonic() + HINT_PAUSE_S


def engine_config(settings: Settings, model: ModelEntry) -> EngineConfig:
    return EngineConfig(
        model=model.path,
        dtype=settings.dtype,
        quantization=settings.quantization,
        kv_cache_dtype=settings.kv_cache_dtype,
        kernels=settings.kernels,
        device=settings.device,
        tensor_parallel=settings.tensor_parallel,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        kv_cache_bytes=settings.kv_cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_num_seqs=settings.max_num_seqs,
        max_n=settings.max_n,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        step_target_ms=settings.step_target_ms,
        max_model_len=settings.max_model_len,
        enable_prefix_caching=settings.prefix_caching,
        speculation=settings.speculation,
        draft_model=settings.draft_model,
        num_draft_tokens=settings.num_draft_tokens,
        cuda_graphs=settings.cuda_graphs,
        overlap_steps=settings.overlap_steps,
        num_threads=settings.threads,
    )


def _load_tokenizer(model: ModelEntry) -> Tokenizer:
    if not Path(model.path).exists():
        raise StartError(
            f"model {model.name}: {model.path} does not exist; "
            f"`tokenmill models fetch {model.name}` gets it, if it is one we know"
        )
    try:
        return Tokenizer.load(model.path)
    except (TokenizerError, ChatTemplateError, OSError) as error:
        raise StartError(f"model {model.name}: {error}") from error
