"""Requests with all features join and leave one batch for 4,000 steps; with -m long for 10,000.

The books balance after every step, and each row's output is what it is alone. One seed draws it
all; but how soon a form is compiled, and how often a row with an expensive mask takes part, is for
the machine's clock to say.
"""

import json
import random
from collections import Counter
from dataclasses import asdict, fields

import pytest

from engine import SamplingParams
from engine.door import checked_params
from engine.sampling_params import ParameterError
from engine.sequence import FinishReason
from engine.structured_outputs import StructuredOutputs
from tests.engine.chat_models import function
from tests.engine.mixes import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Ask,
    TinyModel,
    assert_same,
    names_of,
    some_beams,
    some_options,
    some_prompt,
    some_sampling,
    words,
    write_model,
)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow, pytest.mark.timeout(900)]

NUM_ASKS = 120  # different requests; each comes many times, in other company
MAX_TOKENS = 12
CUT_SHORT = frozenset({FinishReason.DEADLINE, FinishReason.ABORT})
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["x", "on"],
    "additionalProperties": False,
}
FORMS = {
    "json": json.dumps(POINT),
    "json object": json.dumps({"type": "object"}),
    "regex": r"(ab|[0-9]{2}|é){1,4}",
    "choice": json.dumps(["yes", "no", "perhaps not"]),
    "grammar": 'start: "a" rest\nrest: /[b-f]{2}/ | "(" rest ")"',
}
ALL = {
    *(field.name for field in fields(SamplingParams)),
    *(name.partition(" ")[0] for name in FORMS),
    "tool_choice", "priority", "cache_salt", "deadline_s", "generated",
    "preempt", "leave", "resume", "refuse", "like alone",
    *(f"ends by {reason}" for reason in FinishReason),
}  # fmt: skip
UNUSABLE = StructuredOutputs(kind="regex", text="a(?=b)")


def some_ask(model, draw):
    prompt = some_prompt(draw)
    options = some_options(draw, MAX_TOKENS) | {"seed": draw.getrandbits(63)}
    kind = draw.choice(("sample", "sample", "beams", "beams", "form", "form", "tools", "score"))
    if kind == "beams":
        options |= some_beams(draw) | {"repetition_penalty": draw.choice((1.0, 0.6, 1.8))}
    elif kind == "score":
        options |= {"prompt_logprobs": 2, "min_tokens": 0}
    else:
        options |= some_sampling(draw, MAX_TOKENS)
    if kind in ("form", "tools"):
        for name in ("ignore_eos", "min_tokens", "thinking_token_budget"):
            options.pop(name, None)
    if kind == "form":
        name = draw.choice(tuple(FORMS))
        form = StructuredOutputs(kind=name.partition(" ")[0], text=FORMS[name])
        options["structured_outputs"] = form
    if draw.random() < 0.15:
        options["timeout_s"] = draw.uniform(1, 40)
    if kind == "tools":
        return Ask(prompt, calling(model, draw, prompt, options))
    return Ask(prompt, SamplingParams(max_tokens=0 if kind == "score" else MAX_TOKENS, **options))


def calling(model, draw, prompt, options):
    """The params of a reply that has to call one of two tools, as a door makes them."""
    if "repetition_detection" in options:
        options["repetition_detection"] = asdict(options["repetition_detection"])
    return checked_params(
        model.tokenizer,
        prompt,
        options,
        forced_tools=[function("get_a"), function("b", parameters=POINT)],
        parallel_calls=draw.random() < 0.5,
        max_tokens=MAX_TOKENS,
        room=NUM_BLOCKS * BLOCK_SIZE,
        max_model_len=model.runner.max_model_len,
        max_n=16,
    )


def asks_with_lone_outputs(model, draw):
    """Made before anything else runs: engines share the memory of one KV cache."""
    asks = [some_ask(model, draw) for _ in range(NUM_ASKS)]
    pairs = [(ask, model.alone(ask)) for ask in asks]
    return [(ask, lone) for ask, lone in pairs if lone is not None]


class Crowd:
    """An engine with a changing crowd of requests, and what each of them should come to."""

    def __init__(self, model, draw):
        self.draw = draw
        self.pairs = asks_with_lone_outputs(model, draw)
        self.now = 0.0
        self.engine = model.engine(
            clock=lambda: self.now,
            max_num_seqs=draw.choice((6, 12)),
            max_num_batched_tokens=draw.choice((12, 40)),
        )
        self.here = {}  # request id -> (ask, lone output, whether it may be cut short)
        self.size = 1  # requests it should have
        self.drawn = Counter()  # features and events

    def step(self, *, more):
        draw = self.draw
        if draw.random() < 0.05 or not more:
            self.size = draw.choice((1, 2, 3, 6, 12)) if more else 0
        while len(self.here) < self.size and draw.random() < 0.7:
            self.join()
        for event, chance in (
            (self.leave, 0.01),
            (self.leave_and_come_back, 0.03),
            (self.preempt, 0.1),
            (self.be_refused, 0.005),
        ):
            if draw.random() < chance:
                event()
                self.engine.check()
        self.now += 1.0
        for update in self.engine.step():
            if update.output is not None:
                self.end(update.request_id, update.output)
        self.engine.check()

    def join(self):
        draw = self.draw
        ask, lone = draw.choice(self.pairs)
        request_id = str(self.drawn["requests"])
        options = {}
        if draw.random() < 0.3:
            options["priority"] = draw.choice((-1, 1, 2))
        if draw.random() < 0.2:
            options["cache_salt"] = b"another"
        if draw.random() < 0.1:
            options["deadline_s"] = draw.uniform(0, 30)
        if draw.random() < 0.2 and ask.params.num_beams == 1:
            lengths = [draw.randrange(len(c.token_ids) or 1) for c in lone.completions]
            options["generated"] = [
                c.token_ids[:length] for c, length in zip(lone.completions, lengths, strict=True)
            ]
        self.engine.add_request(request_id, ask.prompt, ask.params, **options)
        may_be_cut = "deadline_s" in options or ask.params.timeout_s is not None
        self.here[request_id] = (ask, lone, may_be_cut)
        form = ask.params.structured_outputs
        self.drawn.update(["requests", *options, *names_of(ask.params)])
        self.drawn.update([] if form is None else [form.param, form.kind])

    def leave(self):
        if self.here:
            request_id = self.draw.choice(list(self.here))
            self.end(request_id, self.engine.abort(request_id), aborted=True)
            self.drawn["leave"] += 1

    def leave_and_come_back(self):
        if self.here:
            request_id = self.draw.choice(list(self.here))
            generated = self.engine.checkpoint(request_id)
            self.engine.abort(request_id)
            ask, *_ = self.here[request_id]
            self.engine.add_request(request_id, ask.prompt, ask.params, generated=generated)
            self.drawn["resume"] += 1

    def preempt(self):
        scheduler = self.engine._scheduler
        if scheduler._running:
            scheduler._preempt(self.draw.choice(scheduler._running))
            self.drawn["preempt"] += 1

    def be_refused(self):
        params = SamplingParams(max_tokens=5, structured_outputs=UNUSABLE)
        try:
            self.engine.add_request("refused", [9], params)
        except ParameterError:  # known by now
            self.drawn["refuse"] += 1

    def end(self, request_id, output, *, aborted=False):
        ask, lone, may_be_cut = self.here.pop(request_id)
        ends = [c.finish_reason for c in output.completions]
        self.drawn.update(f"ends by {reason}" for reason in ends)
        cut = CUT_SHORT & set(ends)
        if not cut:
            assert words(output) == words(lone), ask
            assert_same(output, lone)
            self.drawn["like alone"] += 1
            return
        assert aborted or (may_be_cut and FinishReason.ABORT not in cut)
        if ask.params.num_beams > 1:
            return
        pairs = zip(words(output), words(lone), strict=True)
        for (token_ids, *rest), (lone_ids, *lone_rest) in pairs:
            if CUT_SHORT & {*rest}:
                assert lone_ids[: len(token_ids)] == token_ids, ask
            else:
                assert (token_ids, rest) == (lone_ids, lone_rest), ask


@pytest.mark.parametrize("least_steps", [4_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_every_row_among_all_others_is_as_it_is_alone(tmp_path_factory, capsys, least_steps):
    seed = 1
    model = TinyModel(write_model(tmp_path_factory.mktemp("model"), num_layers=1))
    crowd = Crowd(model, random.Random(seed))
    num_steps = 0
    try:
        while num_steps < least_steps or crowd.engine.has_unfinished:
            crowd.step(more=num_steps < least_steps)
            num_steps = crowd.engine.stats().num_steps
    except Exception as error:
        error.add_note(f"seed {seed}, step {num_steps}")
        raise
    stats, drawn = crowd.engine.stats(), crowd.drawn
    with capsys.disabled():
        told = ", ".join(f"{name} {count}" for name, count in sorted(drawn.items()))
        print(  # noqa: T201
            f"\nseed {seed}: {num_steps} steps, {stats.scheduled_seqs} rows, "
            f"{stats.generated_tokens} tokens, {stats.num_preemptions} preemptions, "
            f"{stats.cached_tokens} tokens from the prefix cache; {told}"
        )
    assert stats.num_free_blocks == stats.num_blocks
    assert len(crowd.pairs) > 0.95 * NUM_ASKS, "too many hang on a rounding"
    assert min(drawn[name] for name in ALL) >= least_steps // 500, drawn
