"""What a streamed job's tokens say: the same in every attempt, and never more than the response."""

import itertools
import random

import pytest

from engine.detokenizer import Detokenizer
from engine.reply import parse_reply
from engine.tokenizer import Tokenizer
from jobs.streams import Run, StreamMode, from_lines, whole
from tests.engine.chat_models import function
from tests.worker.test_dispatcher import NOW, World, ended, job
from tests.worker.test_replies import CHAT, TAGGED_OSLO, chat, tokenizers
from worker.entries import Claim, Finish, HandBack
from worker.generation import Limits, prepare
from worker.messages import Delta
from worker.streaming import Streaming

__all__ = ["tokenizers"]
LIMITS = Limits(max_model_len=512, kv_tokens=8192)
TEXT = f"<think>I wonder</think>Well, STO then. {TAGGED_OSLO} And STOP now"


def deltas_of(tokenizer, ids, *, stop=("STOP",), cuts=()):
    """As the engine makes them: pieces with nothing of a stop string, `cuts` ids in one step."""
    detokenizer = Detokenizer(tokenizer, stop=stop)
    pieces = [detokenizer.add([token_id]) for token_id in ids]
    places = [0, *cuts, len(ids)]
    return [
        Delta("k:1", 0, list(ids[a:b]), pieces[a:b]) for a, b in itertools.pairwise(places) if a < b
    ], detokenizer.text


def said(runs):
    pieces = [whole(piece) for run in runs for piece in run.pieces]
    return (
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.content for piece in pieces),
        [call for piece in pieces for call in piece.calls],
    )


@pytest.mark.parametrize("model", ["thinking", "tagged"])
def test_an_attempt_goes_on_where_another_stopped_with_the_same_pieces(tokenizers, model):
    tokenizer = tokenizers[model]
    tools = [function()] if model == "tagged" else []
    body = chat(tools=tools, stop="STOP", stream=True, max_tokens=100)
    prompt = prepare("job_1", CHAT, body, tokenizer, LIMITS, streams=True)
    ids = tokenizer.encode_word(TEXT)
    whole_run, text = deltas_of(tokenizer, ids)
    first = Streaming("job_1", CHAT, prompt, [[]], tokenizer, kept=True)
    everything = first.add(whole_run[0])
    assert everything.start == 0
    for seed in range(20):
        draw = random.Random(seed)
        at = draw.randrange(len(ids))
        cuts = sorted({at, *draw.sample(range(len(ids)), 5)})
        parts, _ = deltas_of(tokenizer, ids, cuts=cuts)
        before = [part for part in parts if part.token_ids]
        resumed = Streaming("job_1", CHAT, prompt, [list(ids[:at])], tokenizer, kept=True)
        length, runs = 0, []
        for part in before:
            if length >= at:
                runs.append(resumed.add(part))
            length += len(part.token_ids)
        assert runs[0].start == at if runs else at == len(ids)
        assert [piece for run in runs for piece in run.pieces] == everything.pieces[at:]
    reasoning, content, calls = said([everything])
    reply = parse_reply(text, prompt.reply_form)
    assert reply.reasoning.startswith(reasoning)
    assert reply.content.startswith(content)
    assert calls == [(call.name, call.arguments) for call in reply.calls]
    assert content or reasoning


@pytest.fixture
def world(tiny_llama_dir):
    return World(Tokenizer.load(tiny_llama_dir))


STREAMED = {"body": {"stream": True}, "stream": StreamMode.KEPT}


def lines_of(text):
    return [(run.sample, run.start, run.pieces) for run in from_lines("job_1", text)]


def test_a_streamed_job_tells_each_step_and_its_row_gets_what_no_beat_has_stored(world):
    add = world.run(**STREAMED)
    assert add.streams
    world.step(Delta(add.key, 0, [7, 8], ["a", "b"]))
    world.dispatcher.holding()
    world.step(Delta(add.key, 0, [9], ["c"]))
    holding = world.dispatcher.holding()
    [held] = holding.held
    assert lines_of(holding.pieces[held].lines) == [(0, 0, ["a", "b", "c"])]
    world.step(Delta(add.key, 0, [10], ["d"]))  # while the beat is on its way
    world.dispatcher.beaten(holding, lost=(), stored={held})
    world.step(Delta(add.key, 0, [11], [""]), ended=[ended(add.key)])
    assert lines_of(world.take(Finish).pieces) == [(0, 3, ["d", ""])]
    told = [(run.start, run.pieces) for step in world.runs for run in step]
    assert told == [(0, ["a", "b"]), (2, ["c"]), (3, ["d"]), (4, [""])]


@pytest.mark.parametrize("how", ["crash", "drain"])
def test_a_job_handed_back_takes_what_it_said_along(world, how):
    add = world.run(**STREAMED, checkpoint=[[5, 6]])
    world.step(Delta(add.key, 0, [7], ["x"]))
    if how == "crash":
        world.dispatcher.engine_died("SIGKILL")
    else:
        world.dispatcher.hand_back_all()
    assert lines_of(world.take(HandBack).pieces) == [(0, 2, ["x"])]


def test_a_live_stream_is_told_and_not_kept(world):
    add = world.run(body={"stream": True}, stream=StreamMode.LIVE)
    world.step(Delta(add.key, 0, [7], ["x"]), ended=[ended(add.key)])
    assert world.runs == [[Run("job_1", 0, 0, ["x"])]]
    assert world.take(Finish).pieces is None


def test_a_job_that_nobody_streams_tells_nothing_and_one_in_a_message_may_not_ask_for_it(world):
    add = world.run()
    assert not add.streams
    world.step(Delta(add.key, 0, [7]))
    assert world.runs == []
    world.receive("job_2")
    world.take(Claim).answer(job("job_2", body={"stream": True}), NOW)
    outcome = world.take(Finish).outcome
    assert (outcome.code, outcome.param) == ("invalid_request", "stream")
