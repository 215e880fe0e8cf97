"""How weights and KV cache are kept, as benchmarks name it: WEIGHTS or WEIGHTS+KV_CACHE."""

from typing import Any


def kept_as(name: str) -> dict[str, Any]:
    """The engine's settings: of float32, float16+int8, int8, int8+float32, …"""
    weights, _, kv_cache = name.partition("+")
    settings = {"dtype": weights, "quantization": "none", "kv_cache_dtype": kv_cache or "auto"}
    if weights == "int8":
        settings |= {"dtype": "auto", "quantization": "int8"}
    return settings
