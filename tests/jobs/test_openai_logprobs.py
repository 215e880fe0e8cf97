"""Log-probabilities as OpenAI's and vLLM's clients expect them."""

import json
import math
from typing import NamedTuple

from jobs.openai_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs

WORDS = {1: b"Hi", 2: "é".encode(), 3: b"\xf0\x9f", 4: b"\0", 5: b" there"}


class Score(NamedTuple):
    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def spell(token_id):
    return WORDS[token_id]


def test_a_chat_has_each_token_with_its_bytes_and_the_likeliest():
    scores = [Score(1, -0.5, 1, ((1, -0.5), (2, -2.0))), Score(3, -4.0, 7, ((5, -0.1), (4, -3.0)))]
    assert chat_logprobs(scores, spell) == {
        "content": [
            {
                "token": "Hi",
                "logprob": -0.5,
                "bytes": [72, 105],
                "top_logprobs": [
                    {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
                    {"token": "é", "logprob": -2.0, "bytes": [195, 169]},
                ],
            },
            {
                "token": "\\xf0\\x9f",
                "logprob": -4.0,
                "bytes": [240, 159],
                "top_logprobs": [
                    {"token": " there", "logprob": -0.1, "bytes": [32, 116, 104, 101, 114, 101]},
                    {"token": "\\x00", "logprob": -3.0, "bytes": [0]},
                ],
            },
        ],
        "refusal": None,
    }


def test_a_completion_has_four_lists_and_always_the_token_chosen():
    places = [
        (1, None),
        (2, Score(2, -3.0, 4, ((1, -0.25), (5, -1.0), (3, -2.0)))),
        (3, Score(3, -0.25, 1, ((3, -0.25),))),
    ]
    assert completion_logprobs(places, [0, 2, 3], 2, spell) == {
        "tokens": ["Hi", "é", "bytes:\\xf0\\x9f"],
        "token_logprobs": [None, -3.0, -0.25],
        "top_logprobs": [
            None,
            {"Hi": -0.25, " there": -1.0, "é": -3.0},
            {"bytes:\\xf0\\x9f": -0.25},
        ],
        "text_offset": [0, 2, 3],
    }


def test_a_prompt_has_entries_by_id_with_ranks():
    scores = [None, Score(5, -3.0, 9, ((1, -0.25), (2, -1.0))), Score(1, -0.5, 1, ((1, -0.5),))]
    assert prompt_logprobs(scores, 1, spell) == [
        None,
        {
            "5": {"logprob": -3.0, "rank": 9, "decoded_token": " there"},
            "1": {"logprob": -0.25, "rank": 1, "decoded_token": "Hi"},
        },
        {"1": {"logprob": -0.5, "rank": 1, "decoded_token": "Hi"}},
    ]


def test_a_vanishing_probability_is_a_number_json_has():
    gone = [Score(1, -math.inf, 3, ((2, -1e30),))]
    (entry,) = chat_logprobs(gone, spell)["content"]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
    legacy = completion_logprobs([(1, gone[0])], [0], 1, spell)
    assert legacy["token_logprobs"] == [-9999.0]
    assert legacy["top_logprobs"] == [{"é": -9999.0, "Hi": -9999.0}]
    prompt = prompt_logprobs(gone, 1, spell)
    assert prompt[0]["1"]["logprob"] == -9999.0
    for shape in (entry, legacy, prompt):
        json.dumps(shape, allow_nan=False)
