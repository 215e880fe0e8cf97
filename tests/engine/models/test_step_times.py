"""What an engine on compiled kernels measures at its start, and what then stands in its config."""

import dataclasses
import json

import pytest

from engine.calibration import DEFAULT_NUM_TOKENS, SIZES
from engine.config import EngineConfig
from engine.llm_engine import LLMEngine
from engine.model_runner import ModelRunner
from engine.models import step_times

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def calibration(monkeypatch, tmp_path):
    """The folder of what is measured; even tiny models are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(step_times, "LEAST_WEIGHTS", 0)
    return tmp_path / ".cache" / "tokenmill" / "calibration"


def config(folder, **settings):
    # the first kernels to run change torch's own choice of threads
    tiny = {"model": str(folder), "device": "cpu", "num_blocks": 8, "num_threads": 1}
    return EngineConfig(**tiny | settings)


def build(folder, **settings):
    return ModelRunner(config(folder, **settings))


def write(folder, seconds):
    """What every file there then says was measured."""
    for file in folder.iterdir():
        file.write_text(json.dumps(json.loads(file.read_text()) | {"seconds": seconds}))


def test_an_engine_measures_once_and_reads_what_it_found(calibration, tiny_llama_dir, caplog):
    caplog.set_level("INFO", "engine")
    first = build(tiny_llama_dir)
    assert 128 <= first.max_num_batched_tokens <= SIZES[-1]
    (file,) = calibration.iterdir()
    kept = json.loads(file.read_text())
    assert kept["key"]["hidden_size"] == first._model._settings.hidden_size
    assert str(tiny_llama_dir) not in file.read_text()
    assert "16" in kept["seconds"]
    assert "measured (tokens: ms) 16: " in caplog.text
    write(calibration, {"64": 0.1, "128": 0.15, "256": 0.2})
    caplog.clear()
    assert build(tiny_llama_dir).max_num_batched_tokens == 256
    assert "at most 256 tokens: measured earlier (tokens: ms) 64: 100.0 128: " in caplog.text


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({"max_num_seqs": 100, "num_blocks": 9, "seed": 4}, False),
        ({"dtype": "bfloat16"}, True),
        ({"quantization": "int8"}, True),
        ({"block_size": 32}, True),
        ({"step_target_ms": 100}, True),
    ],
)
def test_what_times_depend_on_is_measured_for_itself(calibration, tiny_llama_dir, settings, again):
    build(tiny_llama_dir)
    build(tiny_llama_dir, **settings)
    assert len(list(calibration.iterdir())) == 1 + again


@pytest.mark.parametrize("changed", ["_cpu", "_kernels"])
def test_another_processor_or_other_kernels_are_measured(
    calibration, tiny_llama_dir, changed, monkeypatch
):
    build(tiny_llama_dir)
    monkeypatch.setattr(step_times, changed, lambda: "another")
    build(tiny_llama_dir)
    assert len(list(calibration.iterdir())) == 2


@pytest.mark.parametrize(
    "settings", [{"step_target_ms": 0}, {"kernels": "reference"}, {"block_size": 4}]
)
def test_where_nothing_is_measured_the_default_stands(calibration, tiny_llama_dir, settings):
    assert build(tiny_llama_dir, **settings).max_num_batched_tokens == DEFAULT_NUM_TOKENS
    assert not calibration.exists()


def test_a_small_model_is_not_measured(calibration, tiny_llama_dir, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(calibration.parents[2]))
    assert build(tiny_llama_dir).max_num_batched_tokens == DEFAULT_NUM_TOKENS
    assert not calibration.exists()


def test_a_setting_wins_and_measures_nothing(calibration, tiny_llama_dir):
    assert build(tiny_llama_dir, max_num_batched_tokens=7).max_num_batched_tokens == 7
    assert not calibration.exists()


def test_a_home_that_cannot_be_written_is_no_hindrance(calibration, tiny_llama_dir, caplog):
    calibration.parents[1].write_text("a file where a folder should be")
    assert build(tiny_llama_dir).max_num_batched_tokens >= 128
    assert "times of steps not kept" in caplog.text


def test_an_engine_shows_what_was_chosen_and_a_setting_goes_before_it(calibration, tiny_llama_dir):
    build(tiny_llama_dir)
    write(calibration, {"64": 0.1, "128": 0.15, "256": 0.2})
    settings = config(tiny_llama_dir)
    runner = ModelRunner(settings)
    engine = LLMEngine(settings, runner=runner)
    assert engine.stats().max_num_batched_tokens == engine.config.max_num_batched_tokens == 256
    settings = dataclasses.replace(settings, max_num_batched_tokens=9)
    engine = LLMEngine(settings, runner=runner)
    assert engine.stats().max_num_batched_tokens == engine.config.max_num_batched_tokens == 9
