"""Every setting of a deployment, read once from the environment. No other file reads it.

`DATABASE_URL`, `REDIS_URL` and OpenTelemetry's endpoint have their usual names, every other field
is TOKENMILL_<FIELD>. Each field carries its one line of documentation, its unit and its bounds, so
that docs/settings.md and `tokenmill doctor` say what the code checks.

SettingsError
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from jobs.addresses import is_loopback, is_network
from jobs.setting_values import ModelEntry, SettingsError, check, checkpoint, models, read, variable

__all__ = ["ModelEntry", "Settings", "SettingsError", "unknown_variables", "variable"]

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
MIN_ROWS_TTL_S, MAX_ROWS_TTL_S = 60, 315_360_000


def _setting(
    default: Any,
    doc: str,
    *,
    unit: str | None = None,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    secret: bool = False,  # may hold a password: not shown by repr()
) -> Any:
    metadata = {"doc": doc, "unit": unit, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One deployment's settings. Raises SettingsError naming the variable, the bound, the value."""

    database_url: str = _setting(
        "sqlite:///.tokenmill/tokenmill.db",
        "Where jobs live: sqlite:///PATH or postgresql://…; by default a file in the data folder.",
        secret=True,
    )
    redis_url: str = _setting(
        "redis://127.0.0.1:6379/0",
        "The broker: redis://, rediss:// or unix:///SOCKET?db=N.",
        secret=True,
    )
    data_dir: str = _setting(".tokenmill", "Folder of the embedded servers, database and models.")
    models: tuple[ModelEntry, ...] = _setting(
        (ModelEntry(name="smollm2-135m-instruct", path=".tokenmill/models/smollm2-135m-instruct"),),
        "Models served: a comma list of NAME or NAME=CHECKPOINT; NAME alone is "
        "<data_dir>/models/NAME.",
    )
    host: str = _setting("127.0.0.1", "Address the API listens on.")
    auth: str = _setting(
        "none",
        "keys: every call names an API key (`tokenmill keys create`). none: one user, who needs "
        "none, and TOKENMILL_HOST must be an address of this machine alone.",
        choices=("none", "keys"),
    )
    api_key: str = _setting(
        "", "The key that `tokenmill submit` and `tokenmill status` send.", secret=True
    )
    max_failed_keys_per_minute: int = _setting(
        60, "Unknown API keys from one address in a minute, before others that are not known "
        "already are told to wait.", low=1, high=1_000_000,
    )  # fmt: skip
    trusted_proxies: str = _setting(
        "", "Addresses or networks, separated by commas, of proxies in front of the API, whose "
        "X-Forwarded-For says who calls. Empty: nobody is believed.",
    )  # fmt: skip
    port: int = _setting(8000, "Port the API listens on; 0 takes a free one.", low=0, high=65535)
    dtype: str = _setting(
        "auto",
        "Type in which weights and KV cache are kept; auto is the checkpoint's own, but float32 "
        "for a CPU's KV cache. A CPU computes in float32; asked for bfloat16, one that multiplies "
        "it (AMX, AVX512-BF16) rounds what is multiplied to it; asked for float16, one with "
        "AVX512-VNNI to integers of 16 bits with scales.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = _setting(
        "none",
        "Of a checkpoint's 16-bit weights. int8: 8 bits, on a CPU with compiled kernels or a GPU; "
        "on a GPU int4, too, and fp8: float8 products, from compute capability 8.9 on.",
        choices=("none", "int8", "int4", "fp8"),
    )
    kv_cache_dtype: str = _setting(
        "auto",
        "Type of the KV cache; auto is what TOKENMILL_DTYPE says, but on a CPU float16, or "
        "bfloat16 where it multiplies that, where that is auto and weights are in 8 bits. int8 and "
        "fp8 have a scale for each token and head; fp8 is a GPU's, from compute capability 8.9 on, "
        "the other types are a CPU's.",
        choices=("auto", "float32", "float16", "bfloat16", "int8", "fp8"),
    )
    kernels: str = _setting(
        "auto",
        "auto: compiled kernels where they run; reference: plain PyTorch.",
        choices=("auto", "reference"),
    )
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N.")
    tensor_parallel: int = _setting(
        1, "Processes that compute one model together, each on a GPU of its own.", low=1, high=64
    )
    block_size: int = _setting(16, "Tokens in one KV block.", unit="tokens", low=1, high=1024)
    num_blocks: int | None = _setting(
        None, "KV blocks; unset: as many as the memory setting allows.", low=1, high=2**31 - 1
    )
    kv_cache_bytes: int = _setting(
        1 << 30, "Memory of the KV cache on a CPU.", unit="bytes", low=1 << 16, high=1 << 44
    )
    gpu_memory_utilization: float = _setting(
        0.9, "Share of a GPU's memory the engine may fill.", low=0.05, high=1.0
    )
    max_num_seqs: int = _setting(64, "Sequences in one engine step.", low=1, high=65536)
    max_n: int = _setting(16, "Most samples (`n`) of one job.", low=1, high=128)
    max_num_batched_tokens: int | None = _setting(
        None, "Tokens in one engine step; unset: as many as suit the machine, measured at the "
        "first start on a CPU with compiled kernels, or 512.", unit="tokens", low=1, high=1 << 24,
    )  # fmt: skip
    step_target_ms: int = _setting(
        250, "How long a step may keep waiting those who decode beside a prompt, where its tokens "
        "are chosen by measuring; 0: 512 tokens, not measured.", unit="milliseconds",
        low=0, high=60_000,
    )  # fmt: skip
    max_model_len: int | None = _setting(
        None, "Prompt + generated tokens; unset: the model's own limit.", unit="tokens", low=2,
        high=1 << 27,
    )  # fmt: skip
    prefix_caching: bool = _setting(True, "Share the KV blocks of equal prompt beginnings.")
    speculation: str = _setting(
        "off",
        "Guess tokens, several of which one step can confirm: ngram, from a job's own text; draft, "
        "by TOKENMILL_DRAFT_MODEL. Changes no text; pauses where it does not pay.",
        choices=("off", "ngram", "draft"),
    )
    draft_model: str = _setting(
        "", "A smaller checkpoint of the same vocabulary, which guesses: a folder, GGUF file or "
        "hub id; a NAME alone is <data_dir>/models/NAME.",
    )  # fmt: skip
    num_draft_tokens: int = _setting(
        4, "Tokens guessed for one sequence in a step, at most.", unit="tokens", low=1, high=32
    )
    cuda_graphs: bool = _setting(
        True, "On a GPU, steps of decodes are captured when an engine starts, and replayed."
    )
    overlap_steps: bool = _setting(
        True, "On a GPU, the next step is made while the one before is computed."
    )
    threads: int | None = _setting(
        None, "CPU threads of the engine; unset: PyTorch's choice.", low=1, high=4096
    )
    lease_s: float = _setting(
        30.0, "A worker silent this long loses its jobs. It beats however long a step lasts, up to "
        "TOKENMILL_STALL_S. An API process silent this long loses those that end with its callers.",
        unit="seconds", low=1, high=3600,
    )  # fmt: skip
    beat_s: float = _setting(
        5.0, "How often a worker or an API process extends its lease, at most a third of it; "
        "unset: a sixth of it or 5 seconds, the shorter.", unit="seconds", low=0.05, high=1200,
    )  # fmt: skip
    stall_s: float = _setting(
        60.0, "An engine with work and no finished step for this long, or ten times the median of "
        "its last steps if that is longer, is replaced, the one reason not to beat; it may be "
        "longer than the lease, and must be longer than the longest step of a fresh engine.",
        unit="seconds", low=1, high=86_400,
    )  # fmt: skip
    ledger_window_ms: int = _setting(
        20, "Longest wait for more rows before a worker commits.", unit="milliseconds",
        low=0, high=1000,
    )  # fmt: skip
    ledger_rows: int = _setting(256, "Most rows in one of a worker's commits.", low=1, high=4096)
    runway: int = _setting(
        64,
        "Job ids waiting in Redis for each model; beside them four times as many of the "
        "background, in chunks.",
        low=1,
        high=10_000,
    )
    sweep_s: float = _setting(
        0.5, "Pause between two rounds of the sweeper.", unit="seconds", low=0.05, high=60
    )
    republish_s: float = _setting(
        5.0, "A published job still queued after this long, while fewer messages wait, is "
        "published again.", unit="seconds", low=0.5, high=3600,
    )  # fmt: skip
    drain_grace_s: float = _setting(
        30.0, "After SIGTERM a worker finishes jobs for this long, then hands the rest back.",
        unit="seconds", low=0, high=86_400,
    )  # fmt: skip
    max_attempts: int = _setting(
        5, "Claims of one job before it fails; those handed back in good order do not count.",
        low=1, high=100,
    )  # fmt: skip
    max_crashes: int = _setting(
        3, "Engine crashes with one job before it is failed as poisoned.", low=1, high=100
    )
    retry_base_s: float = _setting(
        1.0, "Wait of a job that failed and is tried again; each further failure waits four times "
        "as long, less up to half of it by chance.", unit="seconds", low=0, high=3600,
    )  # fmt: skip
    retry_most_s: float = _setting(60.0, "Longest such wait.", unit="seconds", low=0, high=86_400)
    openapi: bool = _setting(False, "Serve the API's OpenAPI document, at /openapi.json.")
    max_body_bytes: int = _setting(
        4 << 20, "Largest HTTP body accepted.", unit="bytes", low=1 << 10, high=1 << 30
    )
    max_job_bytes: int = _setting(
        1 << 20, "Largest job in it.", unit="bytes", low=1 << 10, high=1 << 30
    )
    max_jobs_per_call: int = _setting(1000, "Most jobs in one submission.", low=1, high=100_000)
    body_memory_bytes: int = _setting(
        64 << 20, "Bodies that one API process holds at once; what comes on top is told to retry.",
        unit="bytes", low=1 << 10, high=1 << 40,
    )  # fmt: skip
    max_waiters: int = _setting(
        4096, "Clients that wait for a job at one API process, by long-poll or stream.",
        low=1, high=1_000_000,
    )  # fmt: skip
    stream_steps: int = _setting(
        10_000, "Engine steps whose tokens stay in Redis for who streams them; older ones are read "
        "from SQL.", low=16, high=10_000_000,
    )  # fmt: skip
    sync_s: float = _setting(
        3600.0, "A call that waits for its answer gets at most so long; then its job expires.",
        unit="seconds", low=1, high=2_592_000,
    )  # fmt: skip
    idempotency_ttl_s: float = _setting(
        86_400.0, "How long an Idempotency-Key is remembered.", unit="seconds", low=1,
        high=31_536_000,
    )  # fmt: skip
    files_dir: str = _setting(
        ".tokenmill/files",
        "Folder of uploaded files and of those made for batches; unset: files in the data folder. "
        "The API and the sweeper share it.",
    )
    max_file_bytes: int = _setting(
        100 << 20, "Largest file accepted.", unit="bytes", low=1 << 10, high=1 << 44
    )
    file_ttl_s: int = _setting(
        2_592_000, "How long a file is kept that names no time of its own.", unit="seconds",
        low=60, high=315_360_000,
    )  # fmt: skip
    batch_order: str = _setting(
        "planned", "Order in which a batch's rows run: those that begin alike together and long "
        "ones first, or that of its file.", choices=("planned", "input"),
    )  # fmt: skip
    batch_rows_ttl_s: int | None = _setting(
        None, "How long rows and output of a batch are kept after its end, where it says nothing "
        "itself; unset: its rows until they are deleted, its files as others.", unit="seconds",
        low=MIN_ROWS_TTL_S, high=MAX_ROWS_TTL_S,
    )  # fmt: skip
    max_batch_rows: int = _setting(50_000, "Most rows of one batch.", low=1, high=10_000_000)
    webhook_timeout_s: float = _setting(
        10.0, "Longest wait for a webhook's receiver, from its address to its reply's status.",
        unit="seconds", low=0.1, high=60,
    )  # fmt: skip
    webhook_private_addresses: bool = _setting(
        False, "Let webhooks go to addresses that are not public, this machine's among them."
    )
    database_pool: int = _setting(
        5, "Database connections of one process; an API has half to read, half to write, 2 more.",
        low=1, high=1000,
    )  # fmt: skip
    key_prefix: str = _setting(
        "tokenmill:", "Before every Redis key and channel; deployments that share a Redis differ."
    )
    log_level: str = _setting(
        "info", "Least severe line logged.", choices=("debug", "info", "warning", "error")
    )
    otlp_endpoint: str = _setting(
        "", "Where OpenTelemetry traces go: the address of a collector that takes OTLP over HTTP. "
        "Empty: nowhere.",
    )  # fmt: skip
    log_format: str = _setting(
        "text", "Lines of the log: text, or an object of JSON each.", choices=("text", "json")
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            check(setting, getattr(self, setting.name))
        if self.auth == "none" and not is_loopback(self.host):
            raise SettingsError(
                "TOKENMILL_HOST",
                f"is {self.host}, which other machines may reach: nobody is asked for a key "
                "unless TOKENMILL_AUTH is keys",
            )
        for each in filter(None, self.trusted_proxies.split(",")):
            if not is_network(each.strip()):
                raise SettingsError(
                    "TOKENMILL_TRUSTED_PROXIES",
                    f"must be addresses or networks, as 10.0.0.0/8, got {each.strip()!r}",
                )
        if self.beat_s > self.lease_s / 3:
            raise SettingsError(
                "TOKENMILL_BEAT_S",
                f"must be at most a third of TOKENMILL_LEASE_S ({self.lease_s:g}), "
                f"got {self.beat_s:g}",
            )
        if self.speculation == "draft" and not self.draft_model:
            raise SettingsError(
                "TOKENMILL_DRAFT_MODEL",
                "must name a checkpoint where TOKENMILL_SPECULATION is draft",
            )
        if self.body_memory_bytes < self.max_body_bytes:
            raise SettingsError(
                "TOKENMILL_BODY_MEMORY_BYTES",
                f"must be at least TOKENMILL_MAX_BODY_BYTES ({self.max_body_bytes}), "
                f"got {self.body_memory_bytes}",
            )
        names = [model.name for model in self.models]
        for name in names:
            if not _MODEL_NAME.fullmatch(name) or ".." in name:
                raise SettingsError(
                    "TOKENMILL_MODELS",
                    f"names must be 1 to 128 letters, digits and . _ / -, got {name!r}",
                )
        if not names or len(set(names)) != len(names):
            raise SettingsError("TOKENMILL_MODELS", f"must list different models, got {names}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Settings of this environment; an unset or empty variable means the default.

        Raises SettingsError on a bad value. See unknown_variables for names nobody reads.
        """
        values: dict[str, Any] = {}
        for each in fields(cls):
            if text := environ.get(variable(each.name), "").strip():
                values[each.name] = read(each, text)
        if "lease_s" in values:
            values.setdefault("beat_s", min(5.0, values["lease_s"] / 6))
        folder = Path(values.get("data_dir", ".tokenmill"))
        if "?" in str(folder):  # in a database URL the path would end there
            raise SettingsError("TOKENMILL_DATA_DIR", f"must not contain '?', got {str(folder)!r}")
        values.setdefault("database_url", f"sqlite:///{folder / 'tokenmill.db'}")
        values.setdefault("files_dir", str(folder / "files"))
        names = environ.get("TOKENMILL_MODELS", "").strip() or "smollm2-135m-instruct"
        values["models"] = models(names, folder)
        if "draft_model" in values:
            values["draft_model"] = checkpoint(values["draft_model"], folder)
        return cls(**values)

    def model(self, name: str) -> ModelEntry | None:
        """The entry of that name, None when this deployment does not serve it."""
        return next((model for model in self.models if model.name == name), None)


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """TOKENMILL_ variables that are no setting: misspelt, most likely.

    Reported, not refused: Kubernetes injects TOKENMILL_SERVICE_HOST and kin by itself.
    """
    known = {variable(each.name) for each in fields(Settings)}
    return sorted(name for name in environ if name.startswith("TOKENMILL_") and name not in known)
