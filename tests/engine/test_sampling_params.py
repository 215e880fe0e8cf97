import pytest

from engine.sampling_params import (
    OPTION_NAMES,
    ParameterError,
    SamplingParams,
    check_prompt,
    params_of,
)

LIMITS = {"vocab_size": 100, "max_model_len": 20}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", 2**31 - 1),
        ("n", 1),
        ("n", 128),
        ("temperature", 0),
        ("temperature", 2),
        ("top_k", -1),
        ("top_k", 0),
        ("top_p", 1e-9),
        ("top_p", 1),
        ("min_p", 0),
        ("min_p", 1),
        ("seed", None),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("min_tokens", 0),
        ("min_tokens", 8),
        ("ignore_eos", True),
        ("stop", ("x" * 256,)),
        ("stop", tuple("abcdefghijklmnop")),
        ("stop_token_ids", tuple(range(64))),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 2),
        ("logit_bias", tuple((i, 100.0 - i % 201) for i in range(1024))),
        ("allowed_token_ids", tuple(range(1024))),
        ("bad_words", ("x" * 256,) * 256),
        ("logprobs", 0),
        ("logprobs", 20),
        ("prompt_logprobs", 20),
        ("timeout_s", 30 * 86400),
        ("thinking_token_budget", 0),
    ],
)
def test_a_value_on_its_bound_is_taken(field, value):
    params = SamplingParams(**{"max_tokens": 8, field: value})
    assert getattr(params, field) == value


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -1, "[0, 2147483647]"),
        ("max_tokens", 2**31, "[0, 2147483647]"),
        ("max_tokens", 1.0, "integer"),
        ("max_tokens", None, "integer"),
        ("max_tokens", True, "integer"),
        ("n", 0, "[1, 128]"),
        ("n", 129, "[1, 128]"),
        ("n", "2", "integer"),
        ("temperature", -1, "[0, 2]"),
        ("temperature", 2.01, "[0, 2]"),
        ("temperature", float("nan"), "[0, 2]"),
        ("temperature", float("inf"), "[0, 2]"),
        ("temperature", "1", "number"),
        ("temperature", True, "number"),
        ("top_k", -2, "[-1, 2147483647]"),
        ("top_k", 1.5, "integer"),
        ("top_p", 0, "(0, 1]"),
        ("top_p", -0.1, "(0, 1]"),
        ("top_p", 1.1, "(0, 1]"),
        ("top_p", float("nan"), "(0, 1]"),
        ("min_p", -0.1, "[0, 1]"),
        ("min_p", 1.1, "[0, 1]"),
        ("seed", -1, "[0, 9223372036854775807]"),
        ("seed", 2**63, "[0, 9223372036854775807]"),
        ("min_tokens", -1, "[0, 8]"),
        ("min_tokens", 9, "[0, 8]"),
        ("ignore_eos", 1, "true or false"),
        ("stop", "abc", "tuple"),
        ("stop", ["abc"], "tuple"),
        ("stop", ("",), "non-empty"),
        ("stop", (b"x",), "non-empty text"),
        ("stop", ("é" * 129,), "256 bytes, got 258"),
        ("stop", ("\ud800",), "Unicode"),
        ("stop", ("a",) * 17, "at most 16, got 17"),
        ("stop_token_ids", 5, "tuple"),
        ("stop_token_ids", (-1,), "[0, 2147483647]"),
        ("stop_token_ids", (True,), "integer"),
        ("stop_token_ids", tuple(range(65)), "at most 64, got 65"),
        ("presence_penalty", 2.01, "[-2, 2]"),
        ("presence_penalty", float("nan"), "[-2, 2]"),
        ("frequency_penalty", -2.01, "[-2, 2]"),
        ("frequency_penalty", 1e308, "[-2, 2]"),
        ("repetition_penalty", 0, "(0, 2]"),
        ("repetition_penalty", float("nan"), "(0, 2]"),
        ("repetition_penalty", 2.1, "(0, 2]"),
        ("logit_bias", ((5, 100.1),), "[-100, 100]"),
        ("logit_bias", ((5, float("nan")),), "[-100, 100]"),
        ("logit_bias", ((5, float("inf")),), "[-100, 100]"),
        ("logit_bias", ((-1, 1.0),), "[0, 2147483647]"),
        ("logit_bias", ((5, 1.0), (5, 2.0)), "each id once"),
        ("logit_bias", (5,), "pairs"),
        ("logit_bias", {5: 1.0}, "tuple"),
        ("logit_bias", tuple((i, 1.0) for i in range(1025)), "at most 1024, got 1025"),
        ("allowed_token_ids", (), "at least 1"),
        ("allowed_token_ids", (True,), "integer"),
        ("allowed_token_ids", tuple(range(1025)), "at most 1024, got 1025"),
        ("bad_words", ("",), "non-empty"),
        ("bad_words", ("x" * 257,), "256 bytes, got 257"),
        ("bad_words", ("x",) * 257, "at most 256, got 257"),
        ("include_stop_str_in_output", "yes", "true or false"),
        ("skip_special_tokens", 1, "true or false"),
        ("logprobs", 21, "[0, 20]"),
        ("logprobs", True, "integer"),
        ("prompt_logprobs", -1, "[0, 20]"),
        ("timeout_s", 0, "(0, 2.592e+06]"),
        ("timeout_s", float("inf"), "(0, 2.592e+06]"),
        ("timeout_s", "5", "number"),
        ("thinking_token_budget", -1, "[0, 2147483647]"),
        ("repetition_detection", {"max_pattern_size": 2, "min_count": 2}, "RepetitionDetection"),
        ("structured_outputs", {"kind": "regex", "text": "a"}, "StructuredOutputs"),
        ("structured_outputs", "a", "StructuredOutputs"),
    ],
)
def test_a_value_out_of_bounds_names_its_field_and_bound(field, value, bound):
    with pytest.raises(ParameterError) as refused:
        SamplingParams(**{"max_tokens": 8, field: value})
    assert refused.value.param == field
    assert field in str(refused.value)
    assert bound in str(refused.value)


@pytest.mark.parametrize(
    ("detection", "param", "bound"),
    [
        ({"max_pattern_size": 0, "min_count": 2}, "max_pattern_size", "[1, 64]"),
        ({"max_pattern_size": 65, "min_count": 2}, "max_pattern_size", "[1, 64]"),
        ({"max_pattern_size": 8, "min_count": 1}, "min_count", "[2, 1024]"),
        ({"max_pattern_size": 8, "min_count": 1025}, "min_count", "[2, 1024]"),
        (
            {"max_pattern_size": 8, "min_count": 2, "min_pattern_size": 9},
            "min_pattern_size",
            "[1, 8]",
        ),
        ({"max_pattern_size": 8}, "min_count", "required"),
        ({"min_count": 8}, "max_pattern_size", "required"),
        ({"max_pattern_size": 8, "min_count": 2, "size": 1}, "size", "not a field"),
    ],
)
def test_an_option_of_several_parts_names_the_part(detection, param, bound):
    with pytest.raises(ParameterError) as refused:
        params_of({"repetition_detection": detection}, max_tokens=8)
    assert refused.value.param == f"repetition_detection.{param}"
    assert bound in str(refused.value)


def test_nothing_to_generate_is_taken_only_with_something_to_score():
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(ParameterError, match="prompt is to be scored") as refused:
        SamplingParams(max_tokens=0, logprobs=5)
    assert refused.value.param == "max_tokens"
    with pytest.raises(ParameterError, match="n must be 1"):
        SamplingParams(max_tokens=0, prompt_logprobs=0, n=2)


def test_allowed_ids_may_not_all_be_banned_until_min_tokens():
    options = {"max_tokens": 8, "allowed_token_ids": (5, 6), "stop_token_ids": (5, 6, 7)}
    SamplingParams(**options)
    with pytest.raises(ParameterError, match="not in stop_token_ids"):
        SamplingParams(**options, min_tokens=1)


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "seed"])
def test_an_endless_integer_is_refused_without_being_printed(field):
    with pytest.raises(ParameterError, match="an integer of 33220 bits") as refused:
        SamplingParams(**{"max_tokens": 8, field: 10**10000})
    assert refused.value.param == field


def test_a_long_value_is_shown_short():
    with pytest.raises(ParameterError) as refused:
        SamplingParams(max_tokens="x" * 5000)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 200


def test_a_temperature_near_zero_is_greedy():
    assert SamplingParams(max_tokens=1, temperature=0.00009).greedy
    assert not SamplingParams(max_tokens=1, temperature=0.0001).greedy


@pytest.mark.parametrize(
    ("num_prompt_tokens", "options", "param"),
    [
        (131_072, {"max_tokens": 0, "prompt_logprobs": 20}, "prompt_logprobs"),
        (131_072, {"max_tokens": 0, "prompt_logprobs": 1}, None),
        (12_483, {"prompt_logprobs": 20}, None),
        (12_484, {"prompt_logprobs": 20}, "prompt_logprobs"),
        (5, {"max_tokens": 780, "n": 16, "logprobs": 20}, None),
        (5, {"max_tokens": 781, "n": 16, "logprobs": 20}, "logprobs"),
        (12_482, {"max_tokens": 2, "logprobs": 20, "prompt_logprobs": 20}, "logprobs"),
        (12_482, {"max_tokens": 1, "logprobs": 20, "prompt_logprobs": 20}, None),
    ],
)
def test_a_response_holds_so_many_log_probabilities(num_prompt_tokens, options, param):
    def check():
        params = SamplingParams(**{"max_tokens": 1, **options})
        check_prompt([1] * num_prompt_tokens, params, vocab_size=9, max_model_len=200_000)

    if param is None:
        check()
        return
    with pytest.raises(ParameterError, match="more than the 262144") as refused:
        check()
    assert refused.value.param == param


def test_option_names_are_the_fields():
    assert {"max_tokens", "top_p", "stop_token_ids"} < OPTION_NAMES
    assert SamplingParams(max_tokens=1, **{}).n == 1


def test_a_prompt_that_fills_the_model_is_taken():
    check_prompt([0, 99] * 9, SamplingParams(max_tokens=2), **LIMITS)
    check_prompt((1,), SamplingParams(max_tokens=19), **LIMITS)
    check_prompt((1,) * 20, SamplingParams(max_tokens=0, prompt_logprobs=0), **LIMITS)


@pytest.mark.parametrize(
    ("prompt", "options", "param", "numbers"),
    [
        ([], {}, "prompt", "at least 1 token, got 0"),
        ([100], {}, "prompt", "[0, 100), got 100"),
        ([-1], {}, "prompt", "[0, 100), got -1"),
        ([True], {}, "prompt", "got True"),
        ([1.0], {}, "prompt", "got 1.0"),
        ([10**10000], {}, "prompt", "bits"),
        ([1], {"stop_token_ids": (5, 100)}, "stop_token_ids", "[0, 100), got 100"),
        ([1], {"logit_bias": ((100, 1.0),)}, "logit_bias", "[0, 100), got 100"),
        ([1], {"allowed_token_ids": (5, 100)}, "allowed_token_ids", "[0, 100), got 100"),
        ([1] * 21, {"max_tokens": 0, "prompt_logprobs": 0}, "prompt", "at most 20, got 21"),
        ([1] * 20, {}, "prompt", "20"),
        ([1] * 18, {"max_tokens": 3}, "max_tokens", "at most 20, got 21"),
    ],
)
def test_a_prompt_the_model_cannot_take_names_the_field_and_the_numbers(
    prompt, options, param, numbers
):
    with pytest.raises(ParameterError) as refused:
        check_prompt(prompt, SamplingParams(**{"max_tokens": 1, **options}), **LIMITS)
    assert refused.value.param == param
    assert numbers in str(refused.value)


def test_a_refusal_of_an_unknown_field_is_short():
    with pytest.raises(ParameterError) as refused:
        params_of({"repetition_detection": {"x" * 5000: 1}}, max_tokens=1)
    assert len(str(refused.value)) < 200
    assert len(refused.value.param) < 110
