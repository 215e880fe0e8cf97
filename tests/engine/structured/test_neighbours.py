"""Measured, not simulated: free rows keep their speed whatever forms arrive beside them.

The vocabulary is a real one, so that masks cost what they do; the weights are few, so that steps
are as short as on the fastest device and a mask weighs the more. Speed is tokens in a second of the
engine thread's processor time: other programs on the machine do not count, what the engine does for
a form does. It is compared with that beside as many rows of an ordinary form, turn by turn in one
run.
"""

import shutil
from itertools import cycle, islice

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.neighbours import HOSTILE, Neighbourhood, hostile_forms, kept
from engine import EngineConfig, LLMEngine, SamplingParams
from engine.structured.pacing import Pacer
from engine.structured_outputs import StructuredOutputs
from tests.engine.models.checkpoints import SIZE

TURN_S = 0.4  # short, for a machine is slow for half a minute and then fast
NUM_ROUNDS = 7
ORDINARY = StructuredOutputs(kind="regex", text="[a-z ]{300}")


@pytest.fixture(scope="module")
def engine(smollm2_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real vocabulary")
    torch.manual_seed(5)
    size = SIZE | {"vocab_size": 49_152, "max_position_embeddings": 1024}
    LlamaForCausalLM(LlamaConfig(**size)).save_pretrained(folder)
    for file in smollm2_dir.glob("*token*"):
        shutil.copy(file, folder)
    return LLMEngine(EngineConfig(model=str(folder), num_threads=1, num_blocks=1024))


def kept_beside(engine, forms, **arriving):
    rows = Neighbourhood(engine, forms, num_free=8, max_arrived=8, other=ORDINARY, **arriving)
    rows.beside_others(TURN_S)
    rows.beside_forms(TURN_S)  # the trial process is up, and some forms are compiled
    rounds = [(rows.beside_others(TURN_S), rows.beside_forms(TURN_S)) for _ in range(NUM_ROUNDS)]
    assert sum(forms.num_hostile_tokens for _, forms in rounds) > 0
    for request_id in rows.free:
        engine.abort(request_id)
    return kept(rounds, lambda turn: turn.by_thread)


def test_free_rows_keep_four_fifths_of_their_speed_beside_hostile_forms(engine):
    assert len(HOSTILE) == 8
    assert kept_beside(engine, hostile_forms()) >= 0.8


@pytest.mark.long
def test_they_do_beside_the_most_expensive_masks_and_would_not_without_turns(engine, monkeypatch):
    """Short outputs, one after another without a pause: a mask costs most at the beginning."""
    forms = list(islice(hostile_forms(["800 optional"]), 4))  # 3 to 8 ms a mask
    for form in forms:
        engine.generate(["a"], SamplingParams(max_tokens=1, structured_outputs=form))
    assert kept_beside(engine, cycle(forms), arrive_every_s=0.0, max_tokens=5) >= 0.8
    monkeypatch.setattr(Pacer, "admitted", lambda self, plan, now: plan)
    assert kept_beside(engine, cycle(forms), arrive_every_s=0.0, max_tokens=5) < 0.8
