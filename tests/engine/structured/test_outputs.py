"""Whatever a model would say, what it says has the form: a tiny random model, hot, and judges."""

import json

import pytest

from engine import EngineConfig, LLMEngine, SamplingParams
from engine.sampling_params import ParameterError
from engine.sequence import FinishReason
from engine.structured.grammar import Grammar, load_vocabulary, translate
from engine.structured_outputs import StructuredOutputs
from tests.engine.structured.forms import judge, random_forms

PROMPT = "once upon a time"
FREE = SamplingParams(max_tokens=20, temperature=1.5, seed=1)


@pytest.fixture(scope="module")
def engine(tiny_llama_dir):
    return LLMEngine(EngineConfig(model=str(tiny_llama_dir), num_threads=1, num_blocks=2048))


@pytest.fixture(scope="module")
def crowded_engine(tiny_llama_dir):
    """Blocks for a few of its sequences only, and no way back by the prefix cache."""
    return LLMEngine(
        EngineConfig(
            model=str(tiny_llama_dir),
            num_threads=1,
            num_blocks=40,
            block_size=4,
            max_model_len=160,
            enable_prefix_caching=False,
        )
    )


def asking(form, seed=0, **options):
    options = {"max_tokens": 80, "temperature": 1.5, "seed": seed} | options
    return SamplingParams(structured_outputs=form, **options)


def regex(text):
    return StructuredOutputs(kind="regex", text=text)


def test_random_forms_are_kept_beside_free_rows(engine):
    forms = random_forms(120, 80, seed=11)
    assert len({form.text for form in forms}) == 200
    requests = [asking(form, i, n=4 if i % 25 == 0 else 1) for i, form in enumerate(forms)]
    mixed = []
    for index, params in enumerate(requests):
        mixed += [FREE, params] if index % 5 == 0 else [params]
    outputs = []
    for first in range(0, len(mixed), 40):  # more at once would wait too long for the compiler
        some = mixed[first : first + 40]
        outputs += engine.generate([PROMPT] * len(some), some)
    num_complete = num_cut = 0
    vocabulary = load_vocabulary(
        engine.tokenizer.to_json(), engine.vocab_size, engine.tokenizer.eos_token_ids
    )
    for params, output in zip(mixed, outputs, strict=True):
        for completion in output.completions:
            form = params.structured_outputs
            if form is None:
                assert completion.token_ids == outputs[0].completions[0].token_ids
            elif completion.finish_reason is FinishReason.STOP:
                num_complete += 1
                judge(form, completion.text)
            else:  # a prefix of what has the form
                assert completion.finish_reason is FinishReason.LENGTH, completion.error
                num_cut += 1
                state = Grammar(vocabulary, translate(form)).state()
                assert any(state.mask(completion.token_ids))
    assert num_complete > 2 * num_cut > 0
    engine.check()


def test_alone_or_among_others_preempted_or_not_the_same_tokens(engine, crowded_engine):
    forms = random_forms(10, 5, seed=12)
    requests = [asking(form, seed, n=1 + 3 * (seed == 3)) for seed, form in enumerate(forms)]
    together = engine.generate([PROMPT] * len(requests), requests)
    for params, expected in zip(requests[:4], together, strict=False):
        (alone,) = engine.generate([PROMPT], params)
        assert alone.completions == expected.completions
    crowded = crowded_engine.generate([PROMPT] * len(requests), requests)
    assert crowded_engine.stats().num_preemptions > 2
    for output, expected in zip(crowded, together, strict=True):
        assert output.completions == expected.completions


def test_an_attempt_that_goes_on_from_a_checkpoint_says_what_the_first_would_have(engine):
    forms = random_forms(6, 4, seed=13)
    requests = [asking(form, seed, n=4) for seed, form in enumerate(forms)]
    whole = engine.generate([PROMPT] * len(requests), requests)
    for index, (params, output) in enumerate(zip(requests, whole, strict=True)):
        cut = [
            each.token_ids[: index * len(each.token_ids) // len(forms)]
            for each in output.completions
        ]
        engine.add_request(str(index), PROMPT, params, generated=cut)
        assert engine.checkpoint(str(index)) == tuple(cut)
    resumed = {}
    while engine.has_unfinished:
        for update in engine.step():
            if update.output is not None:
                resumed[update.request_id] = update.output.completions
    assert resumed == {str(i): output.completions for i, output in enumerate(whole)}


def test_a_checkpoint_that_breaks_the_form_fails_alone(engine):
    word = tuple(engine.tokenizer.encode("xyz"))
    engine.add_request("bad", PROMPT, asking(regex("[0-9]{3}")), generated=[word])
    engine.add_request("good", PROMPT, FREE)
    outputs = {}
    while engine.has_unfinished:
        outputs |= {u.request_id: u.output for u in engine.step() if u.output is not None}
    (bad,) = outputs["bad"].completions
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error.startswith("invalid_request: ")
    assert outputs["good"].completions[0].finish_reason is FinishReason.LENGTH


def test_every_kind_keeps_its_form(engine):
    choices = ["yes", "no", "perhaps (é)", "\\d+", "two\nlines"]
    forms = [
        StructuredOutputs(kind="choice", text=json.dumps(choices)),
        StructuredOutputs(kind="grammar", text='root ::= "<" [a-z]{2} ">" | "(" root ")"'),
        StructuredOutputs(kind="grammar", text='start: "<" WORD ">"\nWORD: /[a-z]{2}/'),
        StructuredOutputs(kind="json", text='{"type":"object","maxProperties":1}', whitespace=""),
    ]
    requests = [asking(form, seed) for seed in range(6) for form in forms]
    said = set()
    for params, output in zip(requests, engine.generate(["a"] * 24, requests), strict=True):
        (completion,) = output.completions
        if completion.finish_reason is FinishReason.LENGTH:
            continue
        text, form = completion.text, params.structured_outputs
        said.add((form.kind, text))
        if form.kind == "json":
            assert json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
            assert isinstance(json.loads(text), dict)
        elif form.kind == "choice":
            assert text in choices
        else:
            bare = text.strip("()")
            assert (bare[0], bare[-1], len(bare)) == ("<", ">", 4)
    assert len({kind for kind, _ in said}) == 3
    assert len(said) > 8


def test_the_end_comes_with_the_last_letter_of_the_form_and_not_before(engine):
    (output,) = engine.generate([PROMPT], asking(regex("abc"), n=4))
    for completion in output.completions:
        assert completion.text == "abc"
        assert completion.finish_reason is FinishReason.STOP
        assert completion.stop_reason is None


def test_a_form_cut_short_by_max_tokens_is_a_length(engine):
    (output,) = engine.generate([PROMPT], asking(regex("[0-9]{50}"), max_tokens=7))
    (completion,) = output.completions
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.text.isdecimal()


def test_a_stop_string_ends_a_form_early_and_says_so(engine):
    (output,) = engine.generate([PROMPT], asking(regex("a,b,c"), stop=("b",)))
    (completion,) = output.completions
    assert completion.text == "a,"
    assert completion.finish_reason is FinishReason.STOP
    assert completion.stop_reason == "b"


def test_filters_draw_from_what_the_form_leaves(engine):
    options = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}]
    texts = {
        output.completions[0].text
        for output in engine.generate(
            [PROMPT] * 4, [asking(regex("[a-z]{4}[0-9]{4}"), **each) for each in options]
        )
    }
    assert len(texts) == 1


def test_a_form_with_no_letter_left_fails_alone_as_a_bad_request(engine):
    digits = engine.tokenizer.encode("7")
    forbidding = asking(regex("[a-z]{4}"), allowed_token_ids=tuple(digits))
    bad, good = engine.generate([PROMPT] * 2, [forbidding, asking(regex("[0-9]{4}"))])
    assert bad.completions[0].finish_reason is FinishReason.ERROR
    assert bad.completions[0].error.startswith("invalid_request: ")
    assert good.completions[0].text.isdecimal()


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_what_would_go_on_behind_the_end_is_refused(options):
    with pytest.raises(ParameterError, match="cannot be combined") as caught:
        asking(regex("a"), **options)
    assert caught.value.param == next(iter(options))
