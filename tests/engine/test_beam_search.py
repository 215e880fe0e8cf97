"""The books of a beam search against plain float64 ones, and what may be asked of one."""

import math
import random

import pytest

from engine.beam_search import BeamSearch, num_candidates
from engine.sampling_params import ParameterError, SamplingParams
from engine.structured_outputs import StructuredOutputs
from tests.engine.diverse_beams import diverse_texts

VOCAB_SIZE = 9
STOP_IDS = frozenset({0, 4})


def log_probabilities(generated, seed):
    """Of each id behind a text, in float64."""
    draw = random.Random(hash((seed, *generated)))
    weights = [math.exp(2.5 * draw.gauss(0, 1)) for _ in range(VOCAB_SIZE)]
    return [math.log(weight / sum(weights)) for weight in weights]


def texts_of(params, seed):
    search = BeamSearch(params, STOP_IDS)
    count = num_candidates(params, len(STOP_IDS))
    while search.live:
        offered = {}
        for beam in search.live:
            scores = log_probabilities(tuple(beam.generated_ids), seed)
            likeliest = sorted(range(VOCAB_SIZE), key=lambda v: -scores[v])
            offered[beam] = tuple((v, scores[v]) for v in likeliest[:count])
        search.advance(offered)
    return [tuple(each.beam.generated_ids) for each in search.best()][: params.n]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_groups_take_turns_as_in_transformers_4(length_penalty, early_stopping):
    lengths, alone = set(), 0
    for seed in range(40):
        draw = random.Random(seed)
        num_groups, size = draw.choice(((2, 1), (2, 2), (3, 2), (4, 1), (2, 4)))
        params = SamplingParams(
            max_tokens=draw.randint(1, 7),
            num_beams=num_groups * size,
            n=num_groups * size,
            num_beam_groups=num_groups,
            diversity_penalty=draw.choice((0.3, 1.0, 5.0)),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        found = texts_of(params, seed)
        assert found == diverse_texts(
            params, STOP_IDS, lambda text, seed=seed: log_probabilities(text, seed)
        )
        lengths |= {len(text) for text in found}
        alone += len(set(found)) == len(found)
    assert len(lengths) > 4
    assert alone > 5  # groups do find texts of their own


def test_a_group_that_has_ended_costs_later_ones_nothing():
    params = SamplingParams(
        max_tokens=3, num_beams=2, n=2, early_stopping=True, num_beam_groups=2, diversity_penalty=50
    )
    search = BeamSearch(params, frozenset({0}))
    (prompt,) = search.live
    search.advance({prompt: ((1, -0.1), (2, -3.0))})
    first, second = search.live
    search.advance({first: ((0, -0.1), (5, -4.0)), second: ((5, -0.1), (7, -3.0))})
    (second,) = search.live  # the first has ended, with 5 next to its end
    search.advance({second: ((5, -0.1), (8, -3.0))})
    assert [each.beam.generated_ids for each in search.best()] == [[1, 0], [2, 7, 5]]


def test_without_ends_a_wide_enough_search_finds_the_likeliest_text():
    params = SamplingParams(max_tokens=2, num_beams=9, n=9, length_penalty=0.0)
    search = BeamSearch(params, frozenset())
    offers = []
    while search.live:
        offers.append({
            beam: tuple(enumerate(log_probabilities(tuple(beam.generated_ids), 1)))
            for beam in search.live
        })  # fmt: skip
        search.advance(offers[-1])
    everything = sorted(
        (
            log_probabilities((), 1)[a] + log_probabilities((a,), 1)[b]
            for a in range(VOCAB_SIZE)
            for b in range(VOCAB_SIZE)
        ),
        reverse=True,
    )
    assert [each.score for each in search.best()] == pytest.approx(everything[:9], abs=1e-5)


def test_the_three_ways_to_stop_differ():
    """A search that may go on longer finds other texts, or the same."""
    found = {
        early_stopping: [
            texts_of(
                SamplingParams(
                    max_tokens=9, num_beams=3, length_penalty=2.0, early_stopping=early_stopping
                ),
                seed,
            )
            for seed in range(30)
        ]
        for early_stopping in (True, False, "never")
    }
    assert found[True] != found[False] != found["never"] != found[True]


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"num_beams": 0}, "num_beams", "must be in [1, 16], got 0"),
        ({"num_beams": 17}, "num_beams", "must be in [1, 16], got 17"),
        ({"num_beams": 2, "n": 3}, "n", "must be in [1, 2], got 3"),
        ({"num_beams": 2, "length_penalty": 6}, "length_penalty", "must be in [-5, 5], got 6"),
        (
            {"num_beams": 2, "early_stopping": 1},
            "early_stopping",
            'must be true, false or "never", got 1',
        ),
        ({"early_stopping": True}, "early_stopping", "needs num_beams of at least 2"),
        ({"length_penalty": 0.0}, "length_penalty", "needs num_beams of at least 2"),
        ({"num_beam_groups": 2}, "num_beam_groups", "must be in [1, 1], got 2"),
        (
            {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0},
            "num_beam_groups",
            "must divide num_beams (4), got 3",
        ),
        (
            {"num_beams": 4, "num_beam_groups": 2},
            "diversity_penalty",
            "must be above 0 with num_beam_groups of at least 2, and only then; got 0 with 2",
        ),
        (
            {"num_beams": 4, "diversity_penalty": 1.0},
            "diversity_penalty",
            "must be above 0 with num_beam_groups of at least 2, and only then; got 1 with 1",
        ),
        ({"num_beams": 2, "temperature": 0.7}, "temperature", "cannot be combined with num_beams"),
        ({"num_beams": 2, "top_p": 0.9}, "top_p", "cannot be combined with num_beams"),
        ({"num_beams": 2, "stop": ("a",)}, "stop", "cannot be combined with num_beams"),
        ({"num_beams": 2, "logprobs": 0}, "logprobs", "cannot be combined with num_beams"),
        (
            {
                "num_beams": 2,
                "structured_outputs": StructuredOutputs(
                    kind="regex", text="a", param="structured_outputs.regex"
                ),
            },
            "structured_outputs.regex",
            "cannot be combined with num_beams",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options, param, message):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(max_tokens=4, **options)
    assert (caught.value.param, str(caught.value)) == (param, f"{param} {message}")


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 1.0, "top_k": -1}, {"seed": 7}, {"top_p": 1}]
)
def test_options_that_change_nothing_are_taken(options):
    assert SamplingParams(max_tokens=4, num_beams=16, n=16, **options).num_seqs == 16
