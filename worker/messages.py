"""What travels over the pipe between a worker and its engine process: one message a step each way.

Each message is one msgpack document. Structs are arrays on the wire and closed unions on both
sides, so a message of another version fails to decode instead of meaning something else.
A request on the pipe is named by its key (see worker.book), not by its job: the same job may come
back to the same worker as a new attempt while the old one is still being dropped.
"""

from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.outputs import TokenLogprobs
from engine.sampling_params import MAX_N, SamplingParams

Stat = int | float | list[int | float]


class Start(msgspec.Struct, frozen=True, array_like=True):
    """The first message to a new engine process."""

    config: EngineConfig
    log_level: str  # a name the logging module knows
    log_format: str = "text"  # see jobs.logs


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    key: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int
    deadline_s: float | None  # seconds from now
    generated: list[list[int]]  # ids of each sample from an earlier attempt; [] to begin afresh
    cache_salt: str = ""  # requests with different salts share no prefix: the tenant's id
    streams: bool = False  # its deltas are to say what each token adds to the text


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    key: str


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Exit now. What still runs is dropped: whoever sends this has handed it back."""


Command = Add | Abort | Stop


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """What takes time from now on, before the engine is ready."""

    phase: Literal["weights", "kernels"]  # kernels: they are compiled, which is done once a machine


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded."""

    pid: int
    max_num_seqs: int
    kv_tokens: int  # tokens the KV cache can hold
    max_model_len: int
    load_s: float
    block_size: int = 1  # tokens; a sequence takes up whole blocks
    max_n: int = MAX_N  # samples of one job


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The engine cannot be built; the process ends after this."""

    message: str


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """Tokens a sample got in this step."""

    key: str
    sample_index: int
    token_ids: list[int]
    pieces: list[str] = []  # of a request that streams: what each id let out of the text
    logprobs: list[TokenLogprobs] | None = None  # the same, if asked for


class Sample(msgspec.Struct, frozen=True, array_like=True):
    index: int
    text: str
    finish_reason: str
    error: str | None
    timed_out: bool = False  # the deadline it ended at was its own timeout_s
    logprobs: list[TokenLogprobs] | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """All samples of a request ended, by themselves or by an abort. Times: CLOCK_MONOTONIC."""

    key: str
    samples: list[Sample]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_token_at: float | None
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """The engine's own door check said no."""

    key: str
    param: str
    message: str
    code: str | None  # an ErrorCode, where the engine has a word of its own


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """What changed since the last message: commands were taken in, a step was run, or both."""

    num_steps: int  # since the engine was built
    num_waiting: int  # sequences that hold no blocks: new, or preempted
    free_tokens: int  # tokens that fit in the KV blocks no sequence holds
    deltas: list[Delta]
    ended: list[Ended]
    refused: list[Refused]
    stats: dict[str, Stat]  # EngineStats by name; empty in most steps


Report = Loading | Ready | StartFailed | Stepped

encode = msgspec.msgpack.Encoder().encode
decode_start = msgspec.msgpack.Decoder(Start).decode
decode_commands = msgspec.msgpack.Decoder(list[Command]).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
