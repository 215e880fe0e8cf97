"""Benchmarks name how a model is kept in one word."""

import pytest

from bench.kept import kept_as
from bench.quality import KEPT
from engine import EngineConfig


@pytest.mark.parametrize(
    ("name", "dtype", "quantization", "kv_cache_dtype"),
    [
        ("float32", "float32", "none", "auto"),
        ("float16+int8", "float16", "none", "int8"),
        ("int8", "auto", "int8", "auto"),
        ("int8+float32", "auto", "int8", "float32"),
        ("int8+int8", "auto", "int8", "int8"),
    ],
)
def test_a_word_names_weights_and_kv_cache(name, dtype, quantization, kv_cache_dtype):
    config = EngineConfig(model="m", **kept_as(name))
    assert config.dtype == dtype
    assert config.quantization == quantization
    assert config.kv_cache_dtype == kv_cache_dtype


def test_a_word_that_names_nothing_is_refused():
    for name in ("float64", "float32+int4"):
        with pytest.raises(ValueError, match="dtype must be"):
            EngineConfig(model="m", **kept_as(name))


def test_quality_is_told_of_what_can_be_kept():
    assert [EngineConfig(model="m", **kept_as(name)) for name in KEPT.values()]
