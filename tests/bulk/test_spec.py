"""What a spec may say, and that each fault names its field."""

import pytest

from bulk.errors import InputError, SpecError
from bulk.inputs import Row
from bulk.requests import Requests, seed_of
from bulk.spec import digest, read_spec

GOOD = """
model: tiny
input: {path: in.csv}
output: {path: out}
prompt: "Say {{ word }}."
"""


def spec_of(folder, text=GOOD):
    (folder / "spec.yaml").write_text(text)
    return read_spec(folder / "spec.yaml")


def body_of(folder, text, values, seed=0):
    return Requests(spec_of(folder, text)).of(values, seed=seed).body


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "sampels: 2\n", "unknown field `sampels`"),
        (GOOD.replace("path: in.csv", "path: in.csv, pth: 1"), "unknown field `pth` - at `input`"),
        (GOOD + "samples: 0\n", "`int` >= 1 - at `samples`"),
        (GOOD + "samples: 1001\n", "`int` <= 1000 - at `samples`"),
        (GOOD + "samples: two\n", "Expected `int`, got `str` - at `samples`"),
        (GOOD + "samples: 1\nsamples: 2\n", "samples stands there twice, again in line 7"),
        (GOOD.replace("prompt", "# prompt"), "prompt is required"),
        (GOOD.replace("model: tiny", ""), "missing required field `model`"),
        (GOOD + "parameters: {seed: 3}\n", "parameters.seed is not a parameter here"),
        (GOOD + "row_parameters: {n: x}\n", "row_parameters.n is not a parameter here"),
        (GOOD + "parameters: {messages: []}\n", "parameters.messages is not a parameter"),
        (GOOD + "endpoint: /v1/embeddings\n", "at `endpoint`"),
        (GOOD + "endpoint: /v1/completions\nsystem: x\n", "system needs the endpoint"),
        (GOOD.replace("in.csv", "in.csv, format: requests"), "prompt is not for an input of"),
        (GOOD + "parameters: {day: 2026-01-02}\n", "parameters.day is no value of JSON's"),
        (
            GOOD + "parameters: {temperature: .nan}\n",
            "parameters.temperature is no value of JSON's",
        ),
        (GOOD + "parameters: {x: &x [*x]}\n", "parameters.x is no value of JSON's"),
        (
            GOOD + "validate: [{json_schema: {const: !!binary aGk=}}]\n",
            "validate[0].json_schema is no value of JSON's",
        ),
        (GOOD.replace("in.csv", "in.csv, delimiter: '\"'"), "input.delimiter must not be a quote"),
        ("model: [\n", "is no YAML"),
        ("", "Expected `object`, got `null`"),
        ("[" * 5000, "nested too deep"),
        ("model: \xff\ufffe", "spec.yaml"),
    ],
)
def test_a_fault_names_its_field(tmp_path, text, said):
    with pytest.raises(SpecError) as caught:
        spec_of(tmp_path, text)
    assert said in str(caught.value)


def test_a_template_that_is_none_is_the_spec_s_fault(tmp_path):
    for text, said in (
        ("{{ word", "prompt line 1"),
        ("{% include 'x' %}", "the tag 'include'"),
        ("{{ word|xmlattr }}", "the filter 'xmlattr'"),
    ):
        spec = spec_of(tmp_path, GOOD.replace("Say {{ word }}.", text))
        with pytest.raises(SpecError) as caught:
            Requests(spec)
        assert said in str(caught.value)


def test_a_row_that_cannot_be_asked_is_told_with_its_place(tmp_path):
    for text, values, said in (
        (GOOD, {"wrod": 1}, "in.csv line 3: prompt cannot be made: 'word' is undefined"),
        (GOOD + "parameters: {temperature: 3}\n", {"word": "x"}, "temperature must be in [0, 2]"),
        (GOOD + "parameters: {top: 3}\n", {"word": "x"}, "top is not"),
        (GOOD + "row_parameters: {top_k: k}\n", {"word": "x"}, "the row has no column 'k'"),
        (GOOD + "row_parameters: {top_k: k}\n", {"word": "x", "k": "z"}, "top_k must be"),
        (GOOD.replace("word", "word.__class__"), {"word": "x"}, "its sandbox forbids"),
        (GOOD.replace("word", "word / 0"), {"word": 1}, "division by zero"),
        (
            GOOD + "repair: {how: show_error, message: '{{ eror }}'}\n",
            {"word": 1},
            "repair.message cannot be made: 'eror' is undefined",
        ),
    ):
        with pytest.raises(InputError) as caught:
            Requests(spec_of(tmp_path, text)).check(Row(0, "in.csv line 3", values))
        assert said in str(caught.value), text
        assert str(caught.value).startswith("in.csv line 3: ")


def test_a_body_is_made_of_template_system_and_parameters(tmp_path):
    text = GOOD + (
        "system: 'You know {{ word }}.'\nparameters: {max_tokens: 5, stop: x}\n"
        "row_parameters: {max_tokens: most, stop: end}\n"
    )
    values = {"word": "hi\u2028", "most": "7", "end": "8"}
    assert body_of(tmp_path, text, values, 42) == {
        "model": "tiny", "max_tokens": 7, "stop": "8", "seed": 42,
        "messages": [
            {"role": "system", "content": "You know hi\u2028."},
            {"role": "user", "content": "Say hi\u2028."},
        ],
    }  # fmt: skip
    assert body_of(tmp_path, text, values | {"most": ""})["max_tokens"] == 5
    completion = GOOD + "endpoint: /v1/completions\n"
    assert body_of(tmp_path, completion, {"word": 1})["prompt"] == "Say 1."


def test_what_a_template_asks_for_may_be_missing_if_it_says_so(tmp_path):
    text = GOOD.replace("{{ word }}", "{{ word | default('none') }} {{ row['odd name'] }}")
    body = body_of(tmp_path, text, {"odd name": "y"})
    assert body["messages"][0]["content"] == "Say none y."


def test_a_request_s_body_goes_before_the_spec_s_parameters(tmp_path):
    text = (
        "model: tiny\noutput: {path: o}\ninput: {path: x, format: requests}\n"
        "parameters: {max_tokens: 5, top_k: 2}"
    )
    values = {"url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 9, "model": "gpt"}}
    assert body_of(tmp_path, text, values, 1) == {
        "model": "tiny", "prompt": "x", "max_tokens": 9, "top_k": 2, "seed": 1
    }  # fmt: skip
    values["body"]["n"] = 2
    with pytest.raises(InputError, match=r"body\.n must be 1"):
        body_of(tmp_path, text, values, 1)


def test_a_seed_is_a_place_s_own(tmp_path):
    places = [(s, row, sample, r) for s in (0, 1) for row in (0, 11) for sample in (0, 1)
              for r in (0, 1)]  # fmt: skip
    assert len({seed_of(*place) for place in places}) == 16
    assert seed_of(0, 1, 11, 0) != seed_of(0, 11, 1, 0)
    assert all(0 <= seed_of(*place) < 2**63 for place in places)


def test_a_spec_s_digest_knows_what_it_says_not_how(tmp_path):
    one = digest(spec_of(tmp_path))
    assert digest(spec_of(tmp_path, "# spec\n" + GOOD)) == one
    assert digest(spec_of(tmp_path, GOOD + "samples: 1\nrepair: {how: reseed}\n")) == one
    checked = GOOD + "validate: [{regex: a}]\n"
    assert len({digest(spec_of(tmp_path, text)) for text in (
        GOOD, checked, checked.replace("regex: a", "regex: b"), GOOD + "parameters: {top_k: 1}\n"
    )}) == 4  # fmt: skip
    assert digest(spec_of(tmp_path, GOOD + "limits: {tokens: 9}\npriority: 0\n")) == one
    assert digest(spec_of(tmp_path, GOOD + "seed: 1\n")) != one
