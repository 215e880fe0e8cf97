"""What the engine can do, under whose names, and which tests would fail without it.

`docs/engine.md` holds the table made of FEATURES; this brings it up to date:
`python -m tests.engine.test_conformance --write`.
"""

import ast
import sys
from dataclasses import dataclass, fields

import pytest

from engine.sampling_params import SamplingParams
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "engine.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
NONE = "–"


@dataclass(frozen=True)
class Feature:
    ours: str
    openai: str
    vllm: str
    transformers: str
    tests: tuple[str, ...]  # file under tests/engine::function


def option(name: str, openai: str, vllm: str, transformers: str, *tests: str) -> Feature:
    return Feature(f"`{name}`", openai, vllm, transformers, tests)


SAME = "same"
GREEDY = "test_greedy_reference.py"
OPTIONS = "test_sampling_options.py"
SEEDED = "test_seeded_tokens.py"
DRAFTS = "speculation/test_same_output.py"
ONE_BY_ONE = f"{OPTIONS}::test_each_option_shows_in_the_output"
DRAWN = "test_sampler.py::test_tokens_come_as_often_as_their_probability_says"
PROCESSED = "test_logits_processors.py::test_tokens_come_as_often_as_the_processed_softmax_says"
SCORES = "test_logprobs.py"
FORMS = "structured/test_outputs.py"
BEAMS = "models/test_beam_search.py::test_texts_are_those_of_transformers"
EACH_FAMILY = tuple(
    f"models/{file}::test_beams_find_the_texts_that_transformers_finds"
    for file in ("test_decoder.py", "test_hf_decoder.py")
)
BEAM_GROUPS = (
    "test_beam_search.py::test_groups_take_turns_as_in_transformers_4",
    "models/test_beam_search.py::test_groups_find_what_transformers_4_found",
)

FEATURES = (
    option("max_tokens", "same, `max_completion_tokens`", SAME, "`max_new_tokens`",
           f"{GREEDY}::test_all_together_and_again_from_the_prefix_cache"),
    option("n", SAME, SAME, "`num_return_sequences`",
           f"{OPTIONS}::test_sixteen_samples_are_the_samples_asked_for_alone"),
    option("temperature", SAME, SAME, SAME, DRAWN),
    option("top_k", NONE, SAME, SAME, DRAWN),
    option("top_p", SAME, SAME, SAME, DRAWN),
    option("min_p", NONE, SAME, SAME, DRAWN),
    option("seed", SAME, SAME, NONE,
           "test_sampler.py::test_a_row_draws_the_same_token_alone_and_in_any_batch",
           f"{SEEDED}::test_in_any_batch_shuffled_and_preempted_each_is_as_alone"),
    option("min_tokens", NONE, SAME, "`min_new_tokens`",
           "test_min_tokens.py::test_it_is_what_hugging_face_does"),
    option("ignore_eos", NONE, SAME, "`eos_token_id=None`",
           "test_min_tokens.py::test_stop_ids_wait_for_min_tokens_and_are_not_in_the_output_before"),
    option("stop", SAME, SAME, "`stop_strings`", "test_endings.py"),
    option("stop_token_ids", NONE, SAME, "`eos_token_id=[…]`", "test_endings.py",
           "test_min_tokens.py::test_stop_ids_wait_for_min_tokens_and_are_not_in_the_output_before"),
    option("include_stop_str_in_output", NONE, SAME, NONE, "test_endings.py", ONE_BY_ONE),
    option("skip_special_tokens", NONE, SAME, "`decode(skip_special_tokens=)`", ONE_BY_ONE),
    option("presence_penalty", SAME, SAME, NONE, PROCESSED,
           "test_logits_processors.py"
           "::test_presence_and_frequency_look_at_the_output_only_and_repetition_at_the_prompt_too"),
    option("frequency_penalty", SAME, SAME, NONE, PROCESSED),
    option("repetition_penalty", NONE, SAME, SAME, PROCESSED),
    option("logit_bias", SAME, SAME, "`sequence_bias`", PROCESSED),
    option("allowed_token_ids", NONE, SAME, "`prefix_allowed_tokens_fn`", PROCESSED),
    option("bad_words", NONE, SAME, "`bad_words_ids`",
           "test_logits_processors.py::test_the_last_token_of_a_bad_word_is_banned_behind_the_others"),
    option("logprobs", "same, `top_logprobs`", SAME, "`output_logits`",
           f"{SCORES}::test_they_are_of_the_models_own_distribution_whatever_the_options"),
    option("prompt_logprobs", "`echo` with `logprobs`", SAME, NONE,
           f"{SCORES}::test_a_prompt_may_be_cut_anywhere_and_scored_in_any_portions",
           f"{SCORES}::test_a_prompt_can_be_scored_with_nothing_generated"),
    option("repetition_detection", NONE, SAME, NONE,
           "test_repetition.py::test_it_says_at_each_token_what_the_definition_says", ONE_BY_ONE),
    option("timeout_s", NONE, NONE, "`max_time`", "test_endings.py"),
    option("num_beams", NONE, "`use_beam_search` with `n`", SAME, BEAMS, *EACH_FAMILY,
           "test_beam_groups.py::test_texts_do_not_depend_on_what_happens_around"),
    option("length_penalty", NONE, SAME, SAME, BEAMS),
    option("early_stopping", NONE, NONE, SAME, BEAMS,
           "test_beam_search.py::test_the_three_ways_to_stop_differ"),
    option("num_beam_groups", NONE, NONE, "same, before 5", *BEAM_GROUPS),
    option("diversity_penalty", NONE, NONE, "same, before 5", *BEAM_GROUPS),
    option("structured_outputs", "`response_format`", SAME, NONE,
           f"{FORMS}::test_random_forms_are_kept_beside_free_rows",
           f"{FORMS}::test_every_kind_keeps_its_form"),
    option("thinking_token_budget", NONE, SAME, NONE,
           "test_logits_processors.py::test_the_end_of_thinking_is_forced_when_its_budget_is_spent"),
    Feature("token ids as a prompt", "`prompt: [ids]`", "`prompt_token_ids`", "`input_ids`",
            (f"{GREEDY}::test_one_at_a_time",)),
    Feature("chat templates", "`messages`", "`LLM.chat`", "`apply_chat_template`",
            ("test_chat_template.py::test_a_real_models_chat_equals_transformers",)),
    Feature("tool calls", "`tools`, `tool_choice`", SAME, "`apply_chat_template(tools=)`",
            ("test_dialect.py::test_a_chat_with_tools_has_the_ids_that_transformers_gives",
             "test_reply.py::test_calls_and_the_text_around_them", "test_call_grammar.py")),
    Feature("reasoning apart from content", "`reasoning_tokens`", "`reasoning_content`", NONE,
            ("test_reply.py::test_a_thought_opens_the_reply_or_is_none",)),
    Feature("chunked prefill beside decodes", NONE, "`enable_chunked_prefill`",
            "`generate_batch`", (f"{GREEDY}::test_in_chunks",)),
    Feature("prefix cache", "`cached_tokens`", "`enable_prefix_caching`", NONE,
            (f"{GREEDY}::test_without_a_prefix_cache",
             f"{GREEDY}::test_all_together_and_again_from_the_prefix_cache")),
    Feature("speculative decoding", NONE, "`speculative_config`", "`prompt_lookup_num_tokens`",
            (f"{DRAFTS}::test_every_row_among_all_others_is_as_it_is_alone",
             f"{DRAFTS}::test_what_is_drawn_with_drafts_has_the_model_s_own_distribution")),
    Feature("preemption without loss", NONE, "recompute", NONE,
            (f"{GREEDY}::test_with_so_few_blocks_that_sequences_are_preempted",
             f"{SEEDED}::test_in_any_batch_shuffled_and_preempted_each_is_as_alone")),
    Feature("going on from tokens generated before", NONE, NONE, NONE,
            (f"{SEEDED}"
             "::test_aborted_and_resumed_from_its_tokens_each_ends_as_if_nothing_had_happened",
             f"{SCORES}::test_what_an_earlier_attempt_generated_is_scored_again")),
    Feature("decoders of any class", NONE, "Transformers backend", "`AutoModelForCausalLM`",
            ("models/test_hf_decoder.py", "models/test_decoder.py")),
)  # fmt: skip


def table() -> str:
    rows = ["| Tokenmill | OpenAI | vLLM | transformers | proven by |", "|---|---|---|---|---|"]
    for each in FEATURES:
        names = "<br>".join(f"`{test.removesuffix('.py')}`" for test in each.tests)
        rows.append(
            f"| {each.ours} | {each.openai} | {each.vllm} | {each.transformers} | {names} |"
        )
    return "\n".join(rows) + "\n"


def page() -> str:
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def test_the_page_holds_the_table():
    assert PAGE.read_text("utf-8") == page(), "python -m tests.engine.test_conformance --write"


def test_every_option_is_in_the_table():
    assert {f"`{field.name}`" for field in fields(SamplingParams)} <= {f.ours for f in FEATURES}


@pytest.mark.parametrize("named", sorted({test for each in FEATURES for test in each.tests}))
def test_what_proves_a_feature_is_there(named):
    file, _, function = named.partition("::")
    tree = ast.parse((REPOSITORY / "tests" / "engine" / file).read_text("utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function:
        assert function in names
    else:
        assert any(name.startswith("test_") for name in names)


if __name__ == "__main__" and "--write" in sys.argv:
    PAGE.write_text(page(), "utf-8")
