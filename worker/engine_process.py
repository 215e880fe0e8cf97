"""The engine process: the only one that loads torch. `python -m worker.engine_process FD`.

FD is one end of a socket pair. The loop takes in every command that has arrived, runs one step,
and reports both in one message. It ends when the pipe does: a parent that died, however it died,
leaves no engine behind. It leaves signals to the parent, who decides what is to be finished.
"""

import atexit
import dataclasses
import gc
import logging
import os
import sys
import time
from multiprocessing.connection import Connection

from engine import outputs
from engine.config import EngineConfig
from engine.lifeline import heed_parent_alone
from engine.llm_engine import LLMEngine
from engine.outputs import EngineStats, RequestOutput, RequestUpdate
from engine.sampling_params import ParameterError
from jobs import logs
from worker.messages import (
    Abort,
    Add,
    Command,
    Delta,
    Ended,
    Loading,
    Ready,
    Refused,
    Report,
    Sample,
    StartFailed,
    Stat,
    Stepped,
    Stop,
    decode_commands,
    decode_start,
    encode,
)

STATS_EVERY_S = 1.0

logger = logging.getLogger(__name__)


def main(fd: int) -> int:
    """Serve the parent at the other end of `fd` until it closes the pipe or says stop."""
    heed_parent_alone()
    atexit.register(gc.freeze)  # its parent waits for the end, and need not for a last collection
    pipe = Connection(fd)
    try:
        start = decode_start(pipe.recv_bytes())
    except EOFError:
        return 0
    logs.set_up_as(
        start.log_format,
        start.log_level,
        text_format="[%(asctime)s: %(levelname)s/engine-%(process)d] %(message)s",
    )
    try:
        engine, load_s = _build(start.config, pipe)
    except Exception as error:
        _report(pipe, StartFailed(f"{type(error).__name__}: {error}"))
        logger.debug("engine not built", exc_info=True)
        return 1
    try:
        stats = engine.stats()
        _report(
            pipe,
            Ready(
                pid=os.getpid(),
                max_num_seqs=start.config.max_num_seqs,
                kv_tokens=stats.num_blocks * start.config.block_size,
                max_model_len=engine.max_model_len,
                load_s=load_s,
                block_size=start.config.block_size,
                max_n=start.config.max_n,
            ),
        )
        EngineServer(engine, pipe).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        logger.info("engine process %d ended: its worker is gone", os.getpid())
    finally:
        engine.close()
    return 0


def _build(config: EngineConfig, pipe: Connection) -> tuple[LLMEngine, float]:
    began = time.monotonic()
    _report(pipe, Loading("weights"))
    engine = LLMEngine(config, on_compile=lambda: _report(pipe, Loading("kernels")))
    return engine, time.monotonic() - began


def _report(pipe: Connection, report: Report) -> None:
    pipe.send_bytes(encode(report))


class EngineServer:
    """Drives one engine by the commands of one pipe."""

    def __init__(self, engine: LLMEngine, pipe: Connection) -> None:
        self._engine = engine
        self._pipe = pipe
        self._ended: list[Ended] = []
        self._refused: list[Refused] = []
        self._streams: set[str] = set()  # keys of the requests that do
        self._stats_due = 0.0
        self._stopped = False

    def serve(self) -> None:
        """Until a Stop. Raises EOFError or an OSError of a closed pipe when the parent is gone."""
        while True:
            idle = not self._engine.has_unfinished
            if idle:
                self._engine.check()
            self._take_commands(wait=idle)
            if self._stopped:
                return
            updates = self._engine.step() if self._engine.has_unfinished else []
            self._send(updates)

    def _take_commands(self, *, wait: bool) -> None:
        """Everything that has arrived; at least one message when there is nothing else to do."""
        while self._pipe.poll(None if wait else 0):
            for command in decode_commands(self._pipe.recv_bytes()):
                self._take(command)
            wait = False

    def _take(self, command: Command) -> None:
        match command:
            case Add():
                self._add(command)
            case Abort():
                self._streams.discard(command.key)
                output = self._engine.abort(command.key)
                if output is not None:
                    self._ended.append(ended(output))
            case Stop():
                self._stopped = True

    def _add(self, add: Add) -> None:
        try:
            self._engine.add_request(
                add.key,
                add.prompt_ids,
                add.params,
                priority=add.priority,
                deadline_s=add.deadline_s,
                generated=add.generated,
                cache_salt=add.cache_salt.encode(),
            )
        except ParameterError as error:
            self._refused.append(refused(add.key, error))
        else:
            if add.streams:
                self._streams.add(add.key)

    def _send(self, updates: list[RequestUpdate]) -> None:
        ended_now = self._ended + [ended(u.output) for u in updates if u.output is not None]
        stats = self._engine.stats()
        report = Stepped(
            num_steps=stats.num_steps,
            num_waiting=stats.num_waiting,
            free_tokens=stats.num_free_blocks * self._engine.config.block_size,
            deltas=[
                self._delta(update.request_id, delta)
                for update in updates
                for delta in update.deltas
                if delta.token_ids
            ],
            ended=ended_now,
            refused=self._refused
            + [refused(u.request_id, u.refusal) for u in updates if u.refusal is not None],
            stats=self._stats_if_due(stats),
        )
        self._ended, self._refused = [], []
        self._streams -= {u.request_id for u in updates if u.output is not None or u.refusal}
        _report(self._pipe, report)

    def _delta(self, key: str, delta: outputs.Delta) -> Delta:
        if key not in self._streams:
            return Delta(key, delta.sample_index, list(delta.token_ids))
        scores = None if delta.logprobs is None else list(delta.logprobs)
        token_ids, pieces = list(delta.token_ids), list(delta.pieces)
        return Delta(key, delta.sample_index, token_ids, pieces, scores)

    def _stats_if_due(self, stats: EngineStats) -> dict[str, Stat]:
        now = time.monotonic()
        if now < self._stats_due and self._engine.has_unfinished:
            return {}
        self._stats_due = now + STATS_EVERY_S
        return dataclasses.asdict(stats)


def refused(key: str, error: ParameterError) -> Refused:
    return Refused(key, error.param, str(error), error.code)


def ended(output: RequestOutput) -> Ended:
    return Ended(
        key=output.request_id,
        samples=[
            Sample(
                index=sample.index,
                text=sample.text,
                finish_reason=sample.finish_reason.value,
                error=sample.error,
                timed_out=sample.timed_out,
                logprobs=None if sample.logprobs is None else list(sample.logprobs),
            )
            for sample in output.completions
        ],
        prompt_tokens=output.stats.prompt_tokens,
        cached_tokens=output.stats.cached_tokens,
        completion_tokens=output.stats.completion_tokens,
        first_token_at=output.stats.first_token_at,
        prompt_logprobs=None if output.prompt_logprobs is None else list(output.prompt_logprobs),
    )


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
