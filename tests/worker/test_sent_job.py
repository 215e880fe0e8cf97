"""Whole jobs in Celery messages: whatever comes becomes a row."""

import json
from datetime import UTC, date, datetime, time
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.envelope import read_envelope
from api.errors import BadRequest
from jobs.lifecycle import ErrorCode
from worker.headers import trace_parent_in
from worker.sent_job import SentJob, read_sent_job

SERVED = ("m", "other")
BODY = {"model": "m", "prompt": "hi"}
# what kombu's JSON makes of a message, beside what JSON has
PYTHONS_OWN = [
    datetime(2026, 1, 2, tzinfo=UTC),
    date(2026, 1, 2),
    time(3, 4),
    UUID(int=5),
    Decimal("0.5"),
    b"bytes",
]
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(PYTHONS_OWN),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.text()), inner, max_size=3)
    ),
)


def read(kwargs: object, max_bytes: int = 10_000) -> SentJob:
    return read_sent_job(
        "job_1", kwargs, max_attempts=5, max_bytes=max_bytes, served=("m", "other")
    )


@pytest.mark.parametrize("given", [None, 5, "", "00-zz-1-01", "0" * 500])
def test_a_message_says_which_trace_it_belongs_to(given):
    parent = "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01"
    assert trace_parent_in({"traceparent": parent}) == parent
    assert trace_parent_in({"traceparent": given}) is None
    sent = read_sent_job(
        "job_1", {"url": "/v1/completions", "body": BODY}, max_attempts=5, max_bytes=10_000,
        served=SERVED, trace_parent=parent,
    )  # fmt: skip
    assert sent.new_job.trace_parent == parent


def test_a_job_has_the_fields_of_one_sent_over_http():
    sent = read(
        {
            "custom_id": "row-17",
            "url": "/v1/completions",
            "body": BODY,
            "priority": -3,
            "deadline_s": 600,
            "max_attempts": 2,
            "metadata": {"k": "v"},
        }
    )
    assert sent.refusal is None
    job = sent.new_job
    assert (job.id, job.custom_id, job.url, job.model) == (
        "job_1",
        "row-17",
        "/v1/completions",
        "m",
    )
    assert (job.priority, job.deadline_s, job.max_attempts) == (-3, 600, 2)
    assert job.body == BODY
    assert job.metadata == {"k": "v"}


def test_what_is_left_out_is_the_deployments_default():
    job = read({"url": "/v1/completions", "body": BODY}).new_job
    assert (job.priority, job.deadline_s, job.max_attempts, job.metadata) == (0, None, 5, {})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"url": None}, "url"),
        ({"body": []}, "body"),
        ({"priority": 11}, "priority"),
        ({"priority": True}, "priority"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"retry_on": ["colour"]}, "retry_on"),
        ({"retry_on": "engine_crash"}, "retry_on"),
        ({"surprise": 1}, "surprise"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"custom_id": "x" * 300}, "custom_id"),
        ({"custom_id": "😀" * 100}, "custom_id"),
        ({"custom_id": "é" * 129}, "custom_id"),
        ({"body": BODY | {"temperature": float("nan")}}, "temperature"),
        ({"body": BODY | {"prompt": "\ud800"}}, "prompt"),
        ({"body": BODY | {"prompt": "\0"}}, "prompt"),
        ({"body": BODY | {"prompt": "x" * 10_000}}, "10000 bytes"),
        ({"body": {"prompt": "hi"}}, "model None"),
        ({"body": BODY | {"model": "nope"}}, "model 'nope' is not served here; served: m, other"),
        ({"body": BODY | {"model": "x" * 5000}}, "is not served here"),
        ({"body": BODY | {"model": ["m"]}}, "is not served here"),
        ({"url": "/" * 5000}, "url"),
    ],
)
def test_a_fault_is_named_in_the_refusal_of_a_row_that_can_be_stored(fields, said):
    sent = read({"url": "/v1/completions", "body": BODY} | fields)
    assert sent.refusal is not None
    assert sent.refusal.code == ErrorCode.INVALID_REQUEST
    assert said in str(sent.refusal)
    assert sent.new_job.id == "job_1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"url": None}, "url"),
        ({"url": "/v1/nope"}, "url"),
        ({"body": []}, "body"),
        ({"priority": True}, "priority"),
        ({"priority": 11}, "priority"),
        ({"priority": 2**70}, "priority"),
        ({"surprise": 1}, "surprise"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"metadata": {"k": "\0"}}, "metadata.k"),
        ({"body": BODY | {"model": "nope"}}, "model"),
        ({"body": BODY | {"temperature": float("nan")}}, "temperature"),
        ({"body": BODY | {"prompt": ["\ud800"]}}, "prompt[0]"),
        ({"body": BODY | {"\ud800": 1}}, "body"),
        ({"body": BODY | {"prompt": "x" * 10_000}}, None),
    ],
)
def test_the_field_to_change_is_named_apart_from_the_message(fields, param):
    refusal = read({"url": "/v1/completions", "body": BODY} | fields).refusal
    assert refusal is not None
    assert refusal.param == param


@pytest.mark.parametrize("value", PYTHONS_OWN, ids=lambda value: type(value).__name__)
def test_what_only_python_has_is_refused_by_its_field_and_kind(value):
    job = {"url": "/v1/completions", "body": BODY, "metadata": {}}
    kind = type(value).__name__
    for fields, param in (
        ({"body": BODY | {"temperature": value}}, "temperature"),
        ({"body": BODY | {"stop": ["x", value]}}, "stop[1]"),
        ({"body": value}, "body"),
        ({"deadline_s": value}, "deadline_s"),
        ({"metadata": {"k": value}}, "metadata.k"),
    ):
        refusal = read(job | fields).refusal
        assert refusal is not None
        assert refusal.code == ErrorCode.INVALID_REQUEST
        assert refusal.param == param
        assert str(refusal).endswith(f"not a JSON value but a {kind}")


def test_what_is_nested_without_end_is_refused():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    refusal = read({"url": "/v1/completions", "body": BODY | {"stop": deep}}).refusal
    assert refusal is not None
    assert "nested more than 32 deep" in str(refusal)
    while deep:  # to free it all at once would be as deep
        deep = deep.pop()  # type: ignore[assignment]


@pytest.mark.parametrize(("kwargs", "param"), [({}, "url"), ([], None), ("x", None), (None, None)])
def test_what_is_no_job_at_all_names_what_is_missing(kwargs, param):
    refusal = read(kwargs).refusal
    assert refusal is not None
    assert refusal.param == param


TEXTS = {"k" * 64: "v" * 512}
DOORS = [
    {},
    {"method": "POST"},
    {"method": "GET"},
    {"method": None},
    {"max_attempts": 100},
    {"max_attempts": 101},
    {"max_attempts": None},
    {"max_attempts": 2**63},
    {"max_attempts": 1.0},
    {"deadline_s": 30 * 86_400},
    {"deadline_s": 30 * 86_400 + 1},
    {"deadline_s": 0},
    {"deadline_s": 1e300},
    {"deadline_s": None},
    {"deadline_s": True},
    {"priority": None},
    {"priority": -10},
    {"priority": -11},
    {"priority": "0"},
    {"custom_id": ""},
    {"custom_id": None},
    {"custom_id": "é" * 128},
    {"custom_id": "é" * 129},
    {"custom_id": 5},
    {"metadata": {str(i): "" for i in range(16)}},
    {"metadata": {str(i): "" for i in range(17)}},
    {"metadata": TEXTS},
    {"metadata": {"k" * 65: ""}},
    {"metadata": {"": "x"}},
    {"metadata": {"k": "v" * 513}},
    {"metadata": []},
    {"metadata": {"k": None}},
    {"url": "/v1/embeddings"},
    {"url": 1},
    {"body": None},
    {"surprise": None},
]


@pytest.mark.parametrize("fields", DOORS, ids=range(len(DOORS)))
def test_both_roads_take_and_refuse_the_same_jobs(fields):
    job = {"url": "/v1/completions", "body": BODY} | fields
    try:
        read_envelope(job)
        accepted = True
    except BadRequest:
        accepted = False
    assert (read(job).refusal is None) == accepted


@given(ANYTHING | st.fixed_dictionaries({"url": ANYTHING, "body": ANYTHING}))
def test_nothing_at_all_makes_the_worker_stumble(kwargs):
    job = read(kwargs).new_job
    json.dumps(job.body, allow_nan=False).encode()
    assert job.id == "job_1"
