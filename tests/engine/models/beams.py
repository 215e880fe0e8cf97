"""Whether beams find the texts that transformers' `generate` finds.

Transformers 5 has no groups, so these are held to the plain search of tests/engine/diverse_beams.py
over transformers' own logits.
"""

import functools

import torch

from engine.sampling_params import SamplingParams
from tests.engine.diverse_beams import diverse_texts
from tests.engine.models.equality import a_scheduler, logits_of, run_all

EOS = 2
TEXTS = ([5, 9, 17, 40, 3], [8, 100, 7] * 9, [11, 60, 61, 62, 63, 64, 65, 66, 120])
STOP_IDS = tuple(range(4, 150, 6))  # so many that texts end in nearly any model
WAYS = [(0.0, False), (1.0, True), (2.0, "never")]  # length_penalty, early_stopping


def beams_of(length_penalty, early_stopping, **options):
    return SamplingParams(
        num_beams=4,
        n=4,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        **{"max_tokens": 9, "stop_token_ids": STOP_IDS} | options,
    )


@torch.inference_mode()
def texts_of_transformers(model, prompt, params, **options):
    """The generated ids of each text, best first."""
    stop_ids = params.stop_ids(frozenset({EOS}))
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        num_beams=params.num_beams,
        num_return_sequences=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=sorted(stop_ids) or None,
        pad_token_id=1,
        **options,
    )
    return [to_its_end(row[len(prompt) :].tolist(), stop_ids) for row in found]


def to_its_end(token_ids, stop_ids):
    """Without the padding behind it."""
    ends = (place for place, token_id in enumerate(token_ids, 1) if token_id in stop_ids)
    return token_ids[: next(ends, len(token_ids))]


def texts_of_groups(model, prompt, params):
    @functools.cache
    def log_probabilities(text):
        logprobs = logits_of(model, [*prompt, *text])[-1].log_softmax(dim=-1)
        logprobs[[*{*prompt, *text}]] *= params.repetition_penalty
        return logprobs.tolist()

    stop_ids = params.stop_ids(frozenset({EOS}))
    return [list(text) for text in diverse_texts(params, stop_ids, log_probabilities)]


def texts_in_one_batch(runner, requests):
    """What the engine finds for each prompt and params, all of them together."""
    scheduler = a_scheduler(
        runner, num_blocks=runner.num_blocks, max_num_seqs=16, eos_token_ids=frozenset({EOS})
    )
    places = [
        scheduler.add(str(n), prompt, params, seed=0) for n, (prompt, params) in enumerate(requests)
    ]
    run_all(scheduler, runner)
    return [
        [place.generated_ids for place in group[: params.n]]
        for group, (_, params) in zip(places, requests, strict=True)
    ]


def check_beams(model, runner):
    """Four beams, and two groups of two, under three length penalties; all in one batch."""
    short, _, longer = TEXTS
    lone = [(text, beams_of(*way)) for text in (short, longer) for way in WAYS]
    grouped = [
        (short, beams_of(*way, num_beam_groups=2, diversity_penalty=1.0, max_tokens=5))
        for way in WAYS
    ]
    found = texts_in_one_batch(runner, [*lone, *grouped])
    assert found[: len(lone)] == [texts_of_transformers(model, *request) for request in lone]
    assert found[len(lone) :] == [texts_of_groups(model, *request) for request in grouped]
