"""A dataset from its input to its files, with the service's part played by a stand-in."""

import csv
import json
from contextlib import closing

import pyarrow.parquet as pq
import pytest

from bulk import look
from bulk import runner as running
from bulk.errors import DatasetError, InputError, OutputError, SpecError
from bulk.outputs import Outputs
from bulk.runner import Runner
from bulk.spec import read_spec
from bulk.workplace import Workplace
from tests.bulk.service import Died, StandIn

SPEC = {
    "model": "tiny", "input": {"path": "in.jsonl"}, "output": {"path": "out", "rows_per_shard": 4},
    "prompt": "Say {{ i }}.", "samples": 2, "parameters": {"max_tokens": 9},
}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    def place(num_rows=10, rows=None, **changes):
        rows = [{"i": i} for i in range(num_rows)] if rows is None else rows
        (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "spec.yaml").write_text(json.dumps(SPEC | changes))
        return tmp_path

    return place


def make(folder, service, *, told=lambda progress: None, before=lambda state: None):
    """One run of the command. Its manifest."""
    workplace = Workplace(read_spec(folder / "spec.yaml"), folder)
    with workplace.held(), closing(workplace.state(new=True)) as state:
        outputs = Outputs(workplace.spec, state, workplace.folder)
        runner = Runner(
            workplace.spec, folder, state, workplace.hidden, told=told,
            settled=outputs.write_settled, pause_s=0.0,
        )  # fmt: skip
        runner.read(workplace.begin(state))
        before(state)
        state.note(wanted=state.fact("wanted") or "run", model=service.model("tiny"))
        runner.run(service)
        return workplace.finish(state)


def lines(folder, pattern="data-*.jsonl"):
    return [
        json.loads(line)
        for path in sorted((folder / "out").glob(pattern))
        for line in path.read_bytes().split(b"\n")
        if line
    ]


def test_each_sample_has_its_line_in_order(place):
    folder = place()
    service = StandIn()
    manifest = make(folder, service)
    assert [batch["fields"] for batch in service.batches.values()] == [{"priority": -5}]
    rows = lines(folder)
    assert [(row["i"], row["generation"]["sample"]) for row in rows] == [
        (i, sample) for i in range(10) for sample in (0, 1)
    ]
    for row in rows:
        assert row["output"] == f"Say {row['i']}. {row['generation']['seed'] % 1000}"
        assert row["generation"]["model_fingerprint"] == "f" * 64
    assert [shard["rows"] for shard in manifest["shards"]] == [8, 8, 4]
    assert manifest["complete"]


def test_whatever_died_it_goes_on_and_asks_for_nothing_twice(place, monkeypatch):
    monkeypatch.setattr(running, "BATCH_TRIES", 9)
    monkeypatch.setattr(running, "LEAST_TRIES", 3)
    folder = place(num_rows=12)
    service = StandIn(rows_at_once=2)
    num_deaths = 0
    while True:
        service.dies_in = 1 + num_deaths % 4
        try:
            make(folder, service)
            break
        except Died:
            num_deaths += 1
    assert num_deaths > 8
    assert sum(len(batch["lines"]) for batch in service.batches.values()) == 24
    assert service.num_answered == 24
    assert [row["i"] for row in lines(folder)] == [i for i in range(12) for _ in (0, 1)]


def test_a_service_that_has_forgotten_the_batch_is_asked_again(place):
    folder = place()
    service = StandIn(rows_at_once=3)

    def forget(progress):
        if progress.delivered == 3:
            service.batches.clear()
            service.by_key.clear()

    make(folder, service, told=forget)
    assert [row["i"] for row in lines(folder)] == [i for i in range(10) for _ in (0, 1)]
    assert service.num_answered < 26


def test_answers_are_looked_at_as_they_come_whatever_their_order(place, monkeypatch):
    """Partial results, failures and repairs do not wait for the rows before them."""
    monkeypatch.setattr(look, "REST", 0)
    folder = place(num_rows=40, samples=1, validate=[{"regex": "good.*"}], repair={"rounds": 1})
    seen = []
    service = StandIn(rows_at_once=4, backwards=True)
    service.answer = lambda body: "bad" if service.num_answered == 1 else "good"  # row 39's
    make(
        folder, service,
        told=lambda each: seen.append((each.delivered, each.repaired, each.answered)),
    )  # fmt: skip
    assert (3, 1, 0) in seen
    assert [row["i"] for row in lines(folder)] == list(range(40))
    assert lines(folder)[-1]["generation"]["round"] == 1


def test_rows_that_the_service_keeps_no_more_are_asked_again(place):
    folder = place(samples=1)
    service = StandIn(rows_at_once=3)

    def empty(progress):
        if progress.delivered >= 3:
            service.emptied.add("batch_0")

    make(folder, service, told=empty)
    assert len(service.batches) == 2
    assert [row["i"] for row in lines(folder)] == list(range(10))
    assert service.num_answered < 20


def test_a_file_that_the_service_has_lost_is_sent_again(place):
    folder = place(samples=1)
    service = StandIn()
    service.dies_in = 0  # when it has the file, and knows of no batch
    with pytest.raises(Died):
        make(folder, service)
    with closing(Workplace(read_spec(folder / "spec.yaml"), folder).state()) as state:
        [batch] = state.open_batches()
        state.sent(batch.number, file_id="file-0")
    service.files.clear()
    make(folder, service)
    assert [row["i"] for row in lines(folder)] == list(range(10))


def test_what_was_left_of_a_limit_is_not_that_of_a_batch_that_was_dropped(place):
    folder = place(samples=1, limits={"tokens": 1000})
    service = StandIn(lambda body: "x" * 10, rows_at_once=3)

    def empty(progress):
        if progress.delivered >= 3:
            service.emptied.add("batch_0")

    make(folder, service, told=empty)
    left = [batch["fields"]["token_budget"] for batch in service.batches.values()]
    assert left[0] == 1000
    assert left[1] <= 1000 - 3 * 20


def test_shards_are_there_before_the_end_each_whole(place):
    folder = place()
    seen = []
    make(folder, StandIn(rows_at_once=1), told=lambda progress: seen.append(len(lines(folder))))
    assert {0, 8, 16, 20} == set(seen)


def odd(body):
    """Every third row is refused at first; row 6 always, row 7 fails."""
    said = body["messages"][-1]["content"]
    number = int("".join(filter(str.isdigit, body["messages"][0]["content"])))
    if number == 7:
        return 500
    if number == 8:
        return 400
    again = len(body["messages"]) > 1
    return "bad" if number % 3 == 0 and (number == 6 or not again) else f"good {said}"


def test_a_refused_output_is_asked_again_with_its_error(place):
    folder = place(
        samples=1, validate=[{"regex": "good.*"}], repair={"rounds": 2, "how": "show_error"}
    )
    service = StandIn(odd)
    manifest = make(folder, service)
    rows = {row["i"]: row for row in lines(folder)}
    assert sorted(rows) == [0, 1, 2, 3, 4, 5, 9]
    assert {i for i in rows if rows[i]["generation"]["round"] == 1} == {0, 3, 9}
    assert rows[3]["output"] == (
        "good That answer was refused: it does not match good.*. Answer again, with the answer "
        "alone."
    )
    rejects = {row["i"]: row for row in lines(folder, "rejects.jsonl")}
    assert {i: row["kind"] for i, row in rejects.items()} == {
        6: "regex", 7: "engine_crash", 8: "invalid_request"
    }  # fmt: skip
    assert (rejects[6]["output"], rejects[6]["generation"]["round"]) == ("bad", 2)
    assert manifest["tries_by_round"] == {"0": 10, "1": 4, "2": 1}
    asked = service.batches["batch_1"]["lines"][0]["body"]["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]
    assert asked[1]["content"] == "bad"


def test_only_what_failed_is_retried_and_not_what_would_be_refused_again(place):
    folder = place(samples=1, validate=[{"regex": "good.*"}])
    make(folder, StandIn(odd))
    service = StandIn(lambda body: "good now")

    def retry(state):
        assert state.retry(rounds=0, not_kinds=["invalid_request"]) == 5

    manifest = make(folder, service, before=retry)
    assert service.num_answered == 5
    assert manifest["samples"]["delivered"] == 9
    assert [row["i"] for row in lines(folder)] == [0, 1, 2, 3, 4, 5, 6, 7, 9]


def test_paused_nothing_is_begun_and_cancelled_what_is_done_stays(place, monkeypatch):
    monkeypatch.setattr(running, "BATCH_TRIES", 8)
    folder = place()
    service = StandIn(rows_at_once=1)
    workplace = Workplace(read_spec(folder / "spec.yaml"), folder)
    wanted = {2: "pause", 5: "run", 6: "cancel"}

    def steer(progress):
        if word := wanted.pop(progress.delivered, None):
            with closing(workplace.state()) as state:
                state.note(wanted=word)

    manifest = make(folder, service, told=steer)
    verbs = [verb for _, verb in service.steered]
    assert verbs[0] == "pause"
    assert verbs[-1] == "cancel"
    assert not manifest["complete"]
    assert manifest["not_delivered"].keys() == {"batch_cancelled"}
    samples = manifest["samples"]
    assert samples["delivered"] == len(lines(folder)) >= 6
    assert samples["delivered"] + samples["failed"] + samples["planned"] == 20


class Sharing(StandIn):
    """Answers each body once, as a batch does that is created with `dedupe`."""

    def _done(self, line):
        body = json.dumps(line["body"])
        earlier = self.seen.setdefault(body, line["custom_id"])
        done = super()._done(line)
        return done if earlier == line["custom_id"] else done | {"saved_tokens": 25}


@pytest.mark.parametrize("dedupe", [True, False])
def test_rows_that_are_the_same_are_asked_as_one_and_counted_as_saved(place, dedupe):
    folder = place(rows=[{"i": i % 3} for i in range(9)], dedupe=dedupe)
    service = Sharing(lambda body: "x" * 15)
    service.seen = {}
    told = []
    manifest = make(folder, service, told=lambda progress: told.append(progress.saved_tokens))
    [batch] = service.batches.values()
    assert batch["fields"].get("dedupe", False) == dedupe
    assert len(service.seen) == (6 if dedupe else 18)  # of two samples each
    assert manifest["tokens"] == (
        {"prompt": 60, "completion": 90, "saved": 300}
        if dedupe
        else {"prompt": 180, "completion": 270, "saved": 0}
    )
    assert told[-1] == manifest["tokens"]["saved"]
    saved = [row["generation"]["saved_tokens"] for row in lines(folder)]
    assert saved == [None] * 6 + [25 if dedupe else None] * 12
    again = make(folder, service)
    assert again["tokens"] == manifest["tokens"]


def test_limits_are_the_batches_and_what_is_left_of_them(place, monkeypatch):
    monkeypatch.setattr(running, "BATCH_TRIES", 4)
    limits = {"tokens": 150, "error_rate": 0.5, "deadline_s": 1000, "retention_s": 7200}
    folder = place(samples=1, limits=limits)
    service = StandIn(lambda body: "x" * 10)
    manifest = make(folder, service)
    given = [batch["fields"] for batch in service.batches.values()]
    assert [fields["token_budget"] for fields in given] == [150, 70]
    assert {fields["max_error_rate"] for fields in given} == {0.5}
    assert {fields["rows_ttl_s"] for fields in given} == {7200}
    assert all(990 < fields["deadline_s"] <= 1000 for fields in given)
    assert (manifest["samples"]["delivered"], manifest["samples"]["planned"]) == (8, 2)
    assert not manifest["complete"]


def test_a_batch_that_the_service_stops_ends_the_dataset(place, monkeypatch):
    monkeypatch.setattr(running, "BATCH_TRIES", 4)
    folder = place(samples=1, limits={"error_rate": 0.1})
    service = StandIn()

    def stopped(batch_id):
        return service.batches[batch_id] | {"status": "cancelled", "stop_reason": "error_rate"}

    service.batch = stopped
    manifest = make(folder, service)
    assert manifest["samples"]["failed"] == 4
    assert manifest["samples"]["planned"] == 6


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_each_format_keeps_the_input_s_columns(place, form):
    rows = [{"i": 1, "tags": ["a"], "mixed": 1}, {"i": 2.5, "mixed": {"x": []}}, {"i": None}]
    folder = place(rows=rows, samples=1, output={"path": "out", "format": form})
    make(folder, StandIn())
    path = folder / "out" / f"data-00000-of-00001.{form}"
    if form == "parquet":
        found = pq.read_table(path).to_pylist()
        assert [row["tags"] for row in found] == [["a"], None, None]
        assert [row["i"] for row in found] == [1.0, 2.5, None]
        assert [row["mixed"] for row in found] == ["1", '{"x": []}', None]
        assert found[1]["generation"]["parameters"] == '{"max_tokens": 9}'
    else:
        with path.open(newline="") as file:
            found = list(csv.DictReader(file))
        assert [row["tags"] for row in found] == ['["a"]', "", ""]
        assert [row["i"] for row in found] == ["1", "2.5", ""]
        assert found[0]["generation.flags"] == "[]"
    assert [row["output"][:6] for row in found] == ["Say 1.", "Say 2.", "Say No"]


def test_another_spec_or_input_is_refused_and_so_is_a_second_run(place):
    folder = place()
    make(folder, StandIn())
    (folder / "in.jsonl").write_text('{"i": 1}\n')
    with pytest.raises(OutputError, match="the input has changed"):
        make(folder, StandIn())
    place(seed=3)
    with pytest.raises(OutputError, match="another spec"):
        make(folder, StandIn())
    workplace = Workplace(read_spec(folder / "spec.yaml"), folder)
    with workplace.held(), pytest.raises(OutputError, match="another run"):
        make(folder, StandIn())


def test_duplicate_rows_are_rows_and_a_custom_id_twice_is_refused(place):
    folder = place(rows=[{"i": 1}] * 3, samples=1)
    make(folder, StandIn())
    assert len({row["output"] for row in lines(folder)}) == 3
    body = {"model": "x", "messages": [{"role": "user", "content": "hi"}]}
    request = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    changes = {"input": {"path": "in.jsonl", "format": "requests"}, "prompt": None}
    folder = place(rows=[request, request], output={"path": "two"}, **changes)
    with pytest.raises(InputError, match=r"line 2: custom_id 'a' is that of in\.jsonl line 1"):
        make(folder, StandIn())
    other = request | {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "x"}}
    folder = place(rows=[request, other], output={"path": "three"}, **changes)
    with pytest.raises(InputError, match="line 2: url must be that of the rows before"):
        make(folder, StandIn())
    folder = place(rows=[request, request | {"custom_id": "b"}], samples=1, **changes)
    with pytest.raises(OutputError):
        make(folder, StandIn())
    folder = place(
        rows=[request, request | {"custom_id": "b"}], samples=1, output={"path": "four"}, **changes
    )
    make(folder, StandIn())
    found = (folder / "four" / "data-00000-of-00001.jsonl").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in found] == ["a", "b"]


def test_a_column_that_the_output_needs_is_refused(place):
    with pytest.raises(SpecError, match=r"output\.column: 'output' is a column of the input"):
        make(place(rows=[{"i": 1, "output": 2}]), StandIn())


def test_what_the_service_refuses_is_told_by_the_input_s_line(place):
    folder = place()
    service = StandIn()

    def refuse(batch_id):
        errors = {"data": [{"line": 3, "message": "no model", "code": "model_not_found"}]}
        return {"status": "failed", "errors": errors}

    service.batch = refuse
    with pytest.raises(DatasetError, match=r"in\.jsonl line 2: no model \(model_not_found\)"):
        make(folder, service)
    make(folder, StandIn())
    assert len(lines(folder)) == 20


def test_a_file_of_requests_ends_at_its_bound(place, monkeypatch):
    monkeypatch.setattr(running, "BATCH_BYTES", 500)
    folder = place()
    service = StandIn()
    make(folder, service)
    assert len(service.batches) > 3
    assert service.num_answered == 20
