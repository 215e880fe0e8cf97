"""Tokenmill's engine: continuous batching over a paged KV cache, usable as a plain library.

The names below are loaded when first touched, so that a process that only checks parameters or
counts tokens (the API, a worker's parent) never loads torch through this package.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "EngineConfig": "engine.config",
    "LLMEngine": "engine.llm_engine",
    "ParameterError": "engine.sampling_params",
    "RequestOutput": "engine.outputs",
    "SamplingParams": "engine.sampling_params",
}

__all__ = ["EngineConfig", "LLMEngine", "ParameterError", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
