import pytest

from engine.config import EngineConfig


def test_the_defaults_are_valid():
    assert EngineConfig(model="somewhere").block_size == 16


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:3"])
def test_a_known_device_is_taken(device):
    assert EngineConfig(model="m", device=device).device == device


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("model", "", "checkpoint folder"),
        ("dtype", "float64", "float32, bfloat16 or float16"),
        ("kv_cache_dtype", "int4", "float32, float16, bfloat16, int8 or fp8"),
        ("device", "tpu", "cuda:N"),
        ("device", "cuda:", "cuda:N"),
        ("block_size", 0, "at least 1"),
        ("block_size", 1.5, "integer"),
        ("num_blocks", 0, "at least 1"),
        ("kv_cache_bytes", 0, "at least 1"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_batched_tokens", -5, "at least 1"),
        ("step_target_ms", -1, "at least 0"),
        ("step_target_ms", 0.5, "integer"),
        ("max_model_len", 0, "at least 1"),
        ("max_n", 0, "at least 1"),
        ("max_n", 129, "at most 128"),
        ("num_threads", 0, "at least 1"),
        ("num_threads", True, "integer"),
        ("gpu_memory_utilization", 0.0, "(0, 1]"),
        ("gpu_memory_utilization", 1.1, "(0, 1]"),
        ("gpu_memory_utilization", float("nan"), "(0, 1]"),
    ],
)
def test_a_value_out_of_bounds_names_its_field_and_bound(field, value, bound):
    with pytest.raises(ValueError, match=field) as refused:
        EngineConfig(**{"model": "m", field: value})
    assert bound in str(refused.value)
