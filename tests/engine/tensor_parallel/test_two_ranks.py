"""Two processes that share a model by gloo give what one gives, token for token."""

import ctypes
import gc
import json
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.crew import RankError
from engine.kernels.registry import REFERENCE
from engine.models.decoder import Decoder
from engine.models.settings import DecoderSettings
from engine.shards import Shard
from engine.structured_outputs import StructuredOutputs
from engine.weights import Checkpoint
from tests.engine.mixes import assert_same
from tests.tiny_llama import VOCAB_SIZE, write_tiny_llama

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def qwen3(llama, tmp_path_factory):
    """With one KV head for both ranks, and one matrix for both ends of the model."""
    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(llama / name, folder)
    return folder


def an_engine(folder, **settings):
    config = {
        "model": str(folder), "device": "cpu", "kernels": "reference", "num_threads": 1,
        "block_size": BLOCK_SIZE, "num_blocks": 40,
    }  # fmt: skip
    return LLMEngine(EngineConfig(**config | settings))


def generated(engine):
    """Prompts that share a beginning, under several options, twice: once from the prefix cache."""
    story = [9 + i * 37 % 300 for i in range(9)]
    prompts = [[*story, 8], [*story, 30, 31], story[:5], [50, 60, 70]]
    form = StructuredOutputs(kind="regex", text="(ab|[0-9]{2}|x){2,3}")
    params = [
        SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=8, seed=1, n=2, presence_penalty=1.0),
        SamplingParams(max_tokens=8, seed=2, top_p=0.9),
        SamplingParams(max_tokens=8, seed=3, structured_outputs=form),
    ]
    return [output for _ in range(2) for output in engine.generate(prompts, params)]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_llama_with_all_that_an_engine_does(llama):
    # 11 blocks of 4 tokens: the four do not fit together
    limits = {"num_blocks": 11, "max_num_batched_tokens": 9, "max_num_seqs": 5}
    alone = generated(an_engine(llama, **limits))
    engine = an_engine(llama, **limits, tensor_parallel=2)
    try:
        [pid] = engine._runner._crew.pids
        together = generated(engine)
        stats = engine.stats()
        heads = engine._runner.kv_cache.shape.layers[0].num_kv_heads
    finally:
        engine.close()
    for output, expected in zip(together, alone, strict=True):
        assert_same(output, expected)
    assert heads == 1, "two KV heads on two ranks"
    assert stats.num_preemptions > 0
    assert stats.cached_tokens > 0
    assert not alive(pid)


def test_qwen3_with_fewer_kv_heads_than_ranks_and_the_end_of_a_rank(qwen3):
    settings = {"speculation": "ngram", "num_draft_tokens": 3}
    alone = generated(an_engine(qwen3, **settings))
    engine = an_engine(qwen3, **settings, tensor_parallel=2)
    try:
        [pid] = engine._runner._crew.pids
        together = generated(engine)
        for output, expected in zip(together, alone, strict=True):
            assert_same(output, expected)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match="rank 1 ended with status -9"):
            engine.generate([[5, 6, 7]], SamplingParams(max_tokens=100, ignore_eos=True))
    finally:
        engine.close()
    assert not alive(pid)


def test_what_cannot_be_shared_is_refused_before_a_rank_is_started(llama):
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda with tensor_parallel"):
        EngineConfig(model="m", device="cuda:1", tensor_parallel=2)
    with pytest.raises(ValueError, match="tensor_parallel must be at most 64"):
        EngineConfig(model="m", tensor_parallel=65)
    with pytest.raises(
        ValueError, match="quantization int8 needs tensor_parallel 1 on a CPU, got 2"
    ):
        an_engine(llama, quantization="int8", tensor_parallel=2)


def own_bytes():
    """Of this process's memory, what is no page of a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def test_a_rank_s_memory_is_never_more_than_its_part(llama, tmp_path):
    """Its own memory while it loads: pages of the file, which ranks share, are not counted."""
    config = json.loads((llama / "config.json").read_text())
    hidden, inner, num_layers = 512, 4096, config["num_hidden_layers"]
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (VOCAB_SIZE, hidden), "lm_head": (VOCAB_SIZE, hidden)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}"] = (hidden,)
        for name, rows in (("q", 512), ("k", 32), ("v", 32), ("o", 512)):
            shapes[f"{prefix}.self_attn.{name}_proj"] = (rows, hidden)
        for name in ("gate", "up"):
            shapes[f"{prefix}.mlp.{name}_proj"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj"] = (hidden, inner)
    shapes["model.norm"] = (hidden,)
    weights = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    whole = sum(weight.nbytes for weight in weights.values())
    save_file(weights, tmp_path / "model.safetensors")
    del weights

    def loaded(rank, num_ranks):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or what earlier ones gave back is taken without growing
        group = SimpleNamespace(shard=Shard(rank, num_ranks))
        done, seen = threading.Event(), [own_bytes()]

        def watch():
            while not done.wait(0.002):
                seen.append(own_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        with Checkpoint(tmp_path) as checkpoint:
            model = Decoder(
                checkpoint,
                DecoderSettings.from_config(checkpoint.config),
                dtype=torch.float32,
                device=torch.device("cpu"),
                kernels=REFERENCE,
                group=group,
            )
        done.set()
        watcher.join()
        seen.append(own_bytes())
        assert model.layers
        return max(seen) - seen[0]

    assert loaded(1, 2) < 0.6 * whole
    assert loaded(0, 1) > 0.9 * whole
