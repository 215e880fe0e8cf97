"""Faults that have brought other engines down, by case, and the tests that show ours bears each.

Over HTTP a value is refused at the door; the same value may come past it by Celery, so the engine's
own door refuses it too. There are no quotas: what many samples cost shows in a job's usage.
"""

import ast
from functools import cache

import pytest

from tests.conftest import REPOSITORY

HTTP = "api/test_bad_input.py::test_a_bad_value_is_refused_by_name"
RAW = "api/test_bad_input.py::test_json_that_two_readers_may_read_differently_is_refused"
PAST_HTTP = "worker/test_service.py::test_a_job_that_got_past_the_api_but_cannot_run_fails_once"
ODD = "engine/test_odd_values.py"
BOUNDS = "engine/test_sampling_params.py::test_a_value_out_of_bounds_names_its_field_and_bound"
COMPILER = "engine/structured/test_compiler.py"
DETOKENIZER = "engine/test_detokenizer.py"
TEMPLATE = "engine/test_chat_template.py"
SANDBOX = "engine/test_template_sandbox.py"

CASES: dict[str, tuple[str, ...]] = {
    "E04 token ids that are none": (
        HTTP, PAST_HTTP, f"{ODD}::test_a_token_id_that_is_none_is_refused",
    ),
    "E05 biases beyond the vocabulary, too many, no numbers": (
        HTTP, RAW, BOUNDS,
        "api/test_bad_input.py::test_a_hundred_thousand_biases_are_counted_not_read",
        f"{ODD}::test_a_bias_beyond_the_vocabulary_is_refused",
        f"{ODD}::test_a_bias_that_is_no_number_or_too_large_is_refused",
    ),
    "E07 empty prompts": (
        HTTP, f"{ODD}::test_an_empty_prompt_is_refused",
        f"{ODD}::test_white_space_is_a_prompt_like_any_other",
        "api/test_submit.py::test_white_space_is_a_prompt",
    ),
    "E08 max_tokens of 0, less, none or too many": (
        HTTP, BOUNDS, "jobs/test_openai.py::test_null_means_not_given",
        "engine/test_sampling_params.py"
        "::test_nothing_to_generate_is_taken_only_with_something_to_score",
        "engine/test_logprobs.py::test_a_prompt_can_be_scored_with_nothing_generated",
        "worker/test_generation.py"
        "::test_without_max_tokens_a_completion_gets_sixteen_and_a_chat_what_is_left",
    ),
    "E10 temperatures near zero and beyond all bounds": (
        HTTP, f"{ODD}::test_a_temperature_of_next_to_nothing_is_greedy",
        f"{ODD}::test_the_lowest_temperature_that_is_not_greedy_and_the_highest_say_something",
        f"{ODD}::test_logits_at_the_ends_of_half_precision_give_a_token",
        "engine/test_sampler.py::test_the_smallest_temperature_that_is_not_greedy_overflows_nothing",
    ),
    "E11 filters that leave one token, or all": (
        HTTP, f"{ODD}::test_the_narrowest_filter_leaves_the_likeliest_token",
        f"{ODD}::test_the_widest_filter_leaves_every_token",
        f"{ODD}::test_a_filter_out_of_bounds_is_refused",
    ),
    "E12 logits that are no numbers": (
        "engine/test_sampler.py::test_a_broken_row_fails_alone",
        "engine/test_llm_engine.py::test_a_row_without_numbers_fails_alone",
        "engine/test_logprobs.py::test_a_prompt_whose_logits_are_no_numbers_fails_alone",
        "worker/test_dispatcher.py::test_what_ends_badly_in_the_engine_says_why",
    ),
    "E22 numbers of samples": (
        HTTP, BOUNDS, f"{ODD}::test_as_many_samples_as_may_be_are_all_there",
        "worker/test_service.py::test_a_chat_is_answered_in_its_endpoints_shape",
    ),
    "E23 log-probabilities of the longest prompt": (
        HTTP, f"{ODD}::test_the_longest_prompt_is_scored_in_bounded_memory",
        f"{ODD}::test_scores_beyond_the_bound_are_refused_before_anything_is_computed",
        "engine/test_sampling_params.py::test_a_response_holds_so_many_log_probabilities",
        "worker/test_generation.py"
        "::test_without_max_tokens_no_more_is_generated_than_can_be_scored",
    ),
    "E24 invalid forms between valid ones": (
        HTTP, f"{ODD}::test_an_invalid_form_between_valid_ones_is_refused_alone",
        "engine/structured/test_waiting.py::test_a_form_that_cannot_be_used_ends_its_request_alone",
        "worker/test_engine_process.py"
        "::test_a_form_is_kept_one_that_is_none_is_refused_and_the_trial_ends_with_its_engine",
    ),
    "E25 hostile forms": (
        f"{ODD}::test_a_hostile_form_ends_and_says_why",
        f"{COMPILER}::test_a_form_that_takes_too_long_is_refused_for_good_and_the_next_one_works",
        f"{COMPILER}"
        "::test_whatever_the_crowd_each_form_is_answered_within_the_limit_and_a_cheap_one_made",
        f"{COMPILER}::test_a_quick_form_passes_those_that_take_long",
        f"{COMPILER}::test_trials_run_at_a_lower_priority_and_are_few",
        f"{COMPILER}::test_however_many_forms_come_memory_is_bounded",
        "engine/structured/test_neighbours.py"
        "::test_free_rows_keep_four_fifths_of_their_speed_beside_hostile_forms",
        "engine/structured/test_neighbours.py"
        "::test_they_do_beside_the_most_expensive_masks_and_would_not_without_turns",
    ),
    "T01 characters of several tokens": (
        f"{DETOKENIZER}::test_no_partial_holds_half_a_character",
        f"{DETOKENIZER}::test_a_real_models_text_comes_in_whole_characters",
        f"{DETOKENIZER}::test_any_ids_end_as_the_text_of_all_at_once",
    ),
    "T04 stop strings over several tokens": (
        f"{DETOKENIZER}::test_text_is_cut_before_the_earliest_stop_string",
        f"{DETOKENIZER}::test_stop_strings_agree_with_a_search_of_the_whole_text",
        "engine/test_llm_engine.py"
        "::test_a_stop_string_ends_the_sequence_and_is_no_part_of_the_text",
    ),
    "T06 stop strings out of bounds": (HTTP, BOUNDS),
    "T07 control tokens in what a client says": (
        f"{TEMPLATE}::test_a_real_models_control_tokens_in_content_are_plain_text",
        f"{TEMPLATE}::test_no_message_can_make_a_control_id",
        "engine/test_dialect.py::test_no_tool_can_make_a_control_token",
    ),
    "T09 templates of the client's, and endless ones": (
        HTTP, f"{SANDBOX}::test_a_rendering_that_prints_nothing_ends_all_the_same",
        f"{TEMPLATE}::test_what_a_template_prints_is_bounded",
    ),
    "T10 templates that reach out": (
        f"{SANDBOX}::test_a_template_that_reaches_out_of_its_sandbox_fails_by_name",
    ),
    "T11 a chat for a model without a template": (
        "api/test_bad_input.py"
        "::test_a_chat_for_a_model_without_a_template_is_a_400_with_its_code",
        f"{TEMPLATE}::test_a_model_without_a_template_takes_no_messages",
    ),
}  # fmt: skip


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((REPOSITORY / "tests" / file).read_text("utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("case", sorted(CASES))
def test_what_shows_that_a_case_holds_is_there(case):
    for named in CASES[case]:
        file, _, function = named.partition("::")
        assert function in functions_of(file), named
