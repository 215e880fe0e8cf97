"""What an engine is built with. Frozen: nothing is changed after the start."""

import re
from dataclasses import dataclass

from engine.sampling_params import MAX_N

MAX_DRAFT_TOKENS = 32
MAX_RANKS = 64  # of one machine


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises ValueError with name, bound and value."""

    model: str  # checkpoint folder, GGUF file or hub id
    # how weights and KV cache are kept: float32, bfloat16, float16 or auto, which is the
    # checkpoint's own type, but float32 for a CPU's KV cache; a CPU computes in float32, but rounds
    # all that is multiplied to bfloat16 or float16 where that is asked for and it has instructions
    # for it
    dtype: str = "auto"
    # of weights that a checkpoint has in 16 bits or more: int8, by a CPU's compiled kernels or on a
    # GPU; there int4, and fp8 with what they are multiplied by, too
    quantization: str = "none"
    # another type for the KV cache: int8, and on a GPU fp8, have a scale for each token's key, and
    # value, of a head; the others are a CPU's. auto is what dtype says, but on a CPU float16, or
    # bfloat16 where it multiplies that, where dtype is auto and weights are in 8 bits
    kv_cache_dtype: str = "auto"
    kernels: str = "auto"  # auto: compiled ones where they run; reference: plain PyTorch
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    # processes that compute one model together: on as many GPUs, from cuda:0 on
    tensor_parallel: int = 1
    block_size: int = 16  # tokens per KV block
    num_blocks: int | None = None  # KV blocks; None: from kv_cache_bytes
    kv_cache_bytes: int = 1 << 30  # memory for the KV cache when num_blocks is None (CPU)
    gpu_memory_utilization: float = 0.9  # share of the GPU's memory for weights, step and KV cache
    max_num_seqs: int = 64  # sequences in one step
    max_n: int = 16  # samples that one request may ask for; [1, 128]
    # tokens in one step; None: what suits the machine, where it is measured, else 512
    max_num_batched_tokens: int | None = None
    # how long a step may take by that choice, on a CPU with compiled kernels; 0: not measured
    step_target_ms: int = 250
    max_model_len: int | None = None  # prompt + generated tokens; None: the model's own limit
    enable_prefix_caching: bool = True
    cuda_graphs: bool = True  # steps of decodes are captured once, on a GPU with compiled kernels
    overlap_steps: bool = True  # the next step is made while a GPU computes the one before
    num_threads: int | None = None  # CPU threads of the engine; None: torch's choice
    # guess tokens, several of which a step can confirm: off; ngram, from the sequence's own text;
    # draft, by draft_model
    speculation: str = "off"
    draft_model: str = ""  # a smaller checkpoint of the same vocabulary, as `model` is given
    num_draft_tokens: int = 4  # guessed for a sequence in one step, at most; [1, 32]
    seed: int = 0  # of the stream from which unseeded requests get their seeds

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must be a checkpoint folder, a GGUF file or a hub id, got ''")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(
                f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}"
            )
        if self.quantization not in ("none", "int8", "int4", "fp8"):
            raise ValueError(
                f"quantization must be none, int8, int4 or fp8, got {self.quantization!r}"
            )
        if self.kv_cache_dtype not in ("auto", "float32", "float16", "bfloat16", "int8", "fp8"):
            raise ValueError(
                f"kv_cache_dtype must be auto, float32, float16, bfloat16, int8 or fp8, "
                f"got {self.kv_cache_dtype!r}"
            )
        if self.kernels not in ("auto", "reference"):
            raise ValueError(f"kernels must be auto or reference, got {self.kernels!r}")
        if re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device) is None:
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if self.speculation not in ("off", "ngram", "draft"):
            raise ValueError(f"speculation must be off, ngram or draft, got {self.speculation!r}")
        if self.speculation == "draft" and not self.draft_model:
            raise ValueError("draft_model must name a checkpoint with speculation draft, got ''")
        if self.tensor_parallel > 1 and re.search(r"\d", self.device):
            raise ValueError(
                f"device must be auto, cpu or cuda with tensor_parallel, got {self.device!r}"
            )
        for name in (
            "tensor_parallel",
            "num_draft_tokens",
            "block_size",
            "max_num_seqs",
            "kv_cache_bytes",
            "max_n",
        ):
            _check_positive(name, getattr(self, name))
        for name, most in (
            ("max_n", MAX_N),
            ("num_draft_tokens", MAX_DRAFT_TOKENS),
            ("tensor_parallel", MAX_RANKS),
        ):
            _check_positive(name, getattr(self, name))
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if type(self.step_target_ms) is not int or self.step_target_ms < 0:
            raise ValueError(
                f"step_target_ms must be an integer of at least 0, got {self.step_target_ms!r}"
            )
        for name in ("num_blocks", "max_num_batched_tokens", "max_model_len", "num_threads"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )


def _check_positive(name: str, value: object) -> None:
    if type(value) is not int:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
