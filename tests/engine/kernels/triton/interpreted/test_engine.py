"""A whole engine on these kernels says what it says on the reference."""

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.kernels import registry, triton


def generated(folder):
    """Prompts in chunks beside decodes, one prefix shared, one request's samples forked."""
    engine = LLMEngine(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", kernels="reference", block_size=8,
            num_blocks=40, max_num_batched_tokens=24,
        )
    )  # fmt: skip
    shared = "the quick brown fox jumps over the lazy dog"
    requests = [
        (shared + " and runs into the garden, once upon a time", {"temperature": 0.0}),
        ("a job is a row", {"n": 2, "seed": 7}),
        (shared, {"temperature": 0.0}),
    ]
    for i, (prompt, options) in enumerate(requests):
        params = SamplingParams(max_tokens=5, ignore_eos=True, **options)
        engine.add_request(str(i), prompt, params)
    ids = {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                ids[update.request_id] = [c.token_ids for c in update.output.completions]
        engine.check()
    return ids


@pytest.mark.usefixtures("one_thread")
def test_the_same_tokens(tiny_llama_dir, monkeypatch):
    wanted = generated(tiny_llama_dir)
    assert len(wanted) == 3
    used = []

    def provide(kernels):
        used.append(kernels)
        return triton.provide(kernels)

    monkeypatch.setitem(registry.PROVIDERS, "cpu", [provide])
    assert generated(tiny_llama_dir) == wanted
    assert used
