"""A whole engine on these kernels says what it says on the reference."""

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.kernels import registry, triton


def generated(folder, kv_cache_dtype):
    """Prompts in chunks beside decodes, one prefix shared, one request's samples forked."""
    engine = LLMEngine(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", kernels="reference", block_size=8,
            num_blocks=40, max_num_batched_tokens=24, kv_cache_dtype=kv_cache_dtype,
        )
    )  # fmt: skip
    shared = "the quick brown fox jumps over the lazy dog"
    requests = [
        (shared + " and runs into the garden, once upon a time", {"temperature": 0.0}),
        ("a job is a row", {"n": 2, "seed": 7}),
        (shared, {"temperature": 0.0}),
    ]
    max_tokens = 5 if kv_cache_dtype == "float32" else 2  # the interpreter is slow
    for i, (prompt, options) in enumerate(requests):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **options)
        engine.add_request(str(i), prompt, params)
    ids = {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                ids[update.request_id] = [c.token_ids for c in update.output.completions]
        engine.check()
    return ids


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_the_same_tokens(tiny_llama_dir, monkeypatch, kv_cache_dtype):
    wanted = generated(tiny_llama_dir, kv_cache_dtype)
    assert len(wanted) == 3
    used = []

    def provide(kernels):
        used.append(kernels)
        return triton.provide(kernels)

    monkeypatch.setitem(registry.PROVIDERS, "cpu", [provide])
    assert generated(tiny_llama_dir, kv_cache_dtype) == wanted
    assert used
