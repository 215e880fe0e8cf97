"""What a deployment sets is what its engines are built with."""

from dataclasses import fields

from engine import EngineConfig
from engine.sampling_params import MAX_N
from jobs.settings import ModelEntry, Settings
from worker.parts import engine_config

SET = {  # each unlike its default
    "dtype": "float16", "quantization": "int8", "kv_cache_dtype": "int8", "kernels": "reference",
    "device": "cpu", "block_size": 32, "num_blocks": 7, "kv_cache_bytes": 1 << 20,
    "gpu_memory_utilization": 0.5, "max_num_seqs": 3, "max_n": 5, "max_num_batched_tokens": 33,
    "max_model_len": 44, "step_target_ms": 99, "prefix_caching": False, "threads": 2,
    "cuda_graphs": False, "overlap_steps": False,
    "speculation": "ngram", "draft_model": "a/draft", "num_draft_tokens": 6, "tensor_parallel": 2,
}  # fmt: skip
NAMES = {"prefix_caching": "enable_prefix_caching", "threads": "num_threads"}  # in the engine


def test_every_setting_of_the_engine_reaches_it():
    config = engine_config(Settings(**SET), ModelEntry(name="mine", path="folder"))
    given = {NAMES.get(name, name): value for name, value in SET.items()} | {"model": "folder"}
    assert given.keys() == {field.name for field in fields(EngineConfig)} - {"seed"}
    assert given == {name: getattr(config, name) for name in given}
    default = EngineConfig(model="m")
    assert all(getattr(default, name) != value for name, value in given.items())


def test_a_deployment_may_allow_as_many_samples_as_an_engine_can_and_allows_its_default():
    [setting] = [each for each in fields(Settings) if each.name == "max_n"]
    assert setting.metadata["high"] == MAX_N
    assert setting.default == EngineConfig(model="m").max_n
