"""A worker as Celery and SQL see it: `celery -A worker.app worker`, Valkey, and both databases."""

import base64
import contextlib
import functools
import json
import time
import uuid
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import select

from jobs.celery_app import DEFAULT_QUEUE, GENERATE_TASK, RUN_TASK, job_id_of, queue_for
from jobs.lifecycle import JobState
from jobs.models import jobs as jobs_table
from jobs.redis_client import connect
from tests.worker.deployment import MODEL, Deployment, completion
from worker.pool import EnginePool


@pytest.fixture
def worker(service):
    return service.workers[0]


def generate(service: Deployment, max_tokens: int = 20, body=None, **options) -> str:
    """Send a whole job by Celery, as any backend service would; its job's id."""
    task_id = str(uuid.uuid4())
    body = {"model": MODEL, "prompt": "hi", "max_tokens": max_tokens, "ignore_eos": True} | (
        body or {}
    )
    job = {"url": "/v1/completions", "body": body}
    service.app.send_task(GENERATE_TASK, kwargs=job, task_id=task_id, **options)
    return "job_" + task_id.replace("-", "")


def test_a_job_sent_by_celery_shows_its_prompt_tokens_from_its_start_to_any_end(service):
    num_prompt_tokens = 200
    prompt = [5] * num_prompt_tokens
    done = generate(service, body={"prompt": prompt})
    refused = generate(service, body={"prompt": prompt, "temperature": -1})
    late = generate(service, 15_000, body={"prompt": prompt}, time_limit=0.5)
    running = generate(service, 15_000, body={"prompt": prompt})
    service.wait_for(lambda: bool((row := service.find(running)) and row.prompt_tokens))
    row = service.get(running)
    assert (row.state, row.prompt_tokens) == (JobState.RUNNING, num_prompt_tokens)
    assert row.max_tokens == 15_000
    service.cancel(running)
    rows = service.ended(done, refused, late, running)
    assert [row.state for row in rows] == [
        JobState.SUCCEEDED, JobState.FAILED, JobState.FAILED, JobState.CANCELLED,
    ]  # fmt: skip
    for job_id in (done, refused, late, running):
        # the ledger may write it just after the end
        service.wait_for(lambda job_id=job_id: service.get(job_id).prompt_tokens > 0)
        assert service.get(job_id).prompt_tokens == num_prompt_tokens


def test_a_job_cancelled_before_a_beat_has_seen_it_keeps_its_first_tokens_time(service, worker):
    """Beats are half a second apart: the first of these ends between its first token and a beat."""
    for wait_s in (0.2, 1.0, 5.0):  # until it has a token, on a machine however busy
        [job_id] = service.submit(completion(15_000))
        service.wait_for(lambda job_id=job_id: service.get(job_id).state == JobState.RUNNING)
        time.sleep(wait_s)
        service.cancel(job_id)
        service.wait_for(
            lambda id_=job_id: f"{id_} attempt 1 dropped: not ours" in worker.log_text()
        )
        service.next_beat(worker)  # what it had generated is in its row by then
        if service.get(job_id).wasted_tokens:
            break
    row = service.get(job_id)
    assert (row.state, row.wasted_tokens > 0) == (JobState.CANCELLED, True)
    assert row.started_at <= row.first_token_at


def test_celery_jobs_may_ask_for_as_many_samples_as_the_deployment_lets_them(sqlite_deployment):
    sqlite_deployment.env["TOKENMILL_MAX_N"] = "32"
    sqlite_deployment.start_worker()
    most, more = (generate(sqlite_deployment, 2, body={"n": n}) for n in (32, 33))
    for job_id in (most, more):
        sqlite_deployment.wait_for(lambda job_id=job_id: sqlite_deployment.find(job_id) is not None)
    done, refused = sqlite_deployment.ended(most, more)
    assert (done.state, done.completion_tokens) == (JobState.SUCCEEDED, 64)
    assert len(done.output["choices"]) == 32
    assert (refused.error["code"], refused.error["param"]) == ("invalid_request", "n")
    assert refused.error["message"] == "n must be in [1, 32], got 33"


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def engine_idle(service: Deployment) -> bool:
    row = service.row_of(service.workers[0])
    assert row is not None
    return row.stats.get("num_free_blocks") == row.stats.get("num_blocks")


def test_jobs_succeed_with_output_counts_and_times(service):
    ids = service.submit(*(completion(30, prompt=f"job number {i}") for i in range(40)))
    for row in service.ended(*ids):
        assert row.state == JobState.SUCCEEDED, row.error
        assert (row.attempt, row.completion_tokens, row.wasted_tokens) == (1, 30, 0)
        assert row.finish_reason == "length"
        assert row.output["usage"]["completion_tokens"] == 30
        assert row.output["choices"][0]["text"]
        assert row.created_at <= row.started_at <= row.first_token_at <= row.finished_at
    assert service.unacknowledged() == 0


def test_a_chat_is_answered_in_its_endpoints_shape(service):
    messages = [{"role": "user", "content": "what is the capital?"}]
    body = {"messages": messages, "prompt": None, "n": 2, "temperature": 1.0}
    [job_id] = service.submit(completion(8, url="/v1/chat/completions", body=body))
    [row] = service.ended(job_id)
    assert row.state == JobState.SUCCEEDED, row.error
    assert row.output["object"] == "chat.completion"
    assert [choice["index"] for choice in row.output["choices"]] == [0, 1]
    assert row.completion_tokens == 16


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"temperature": 3}, "invalid_request", "temperature"),
        ({"prompt": [5, 400]}, "invalid_request", "prompt"),
        ({"max_tokens": 20_000}, "context_length_exceeded", "max_tokens"),
        ({"prompt": [5] * 15_950, "max_tokens": 100}, "exceeds_capacity", "max_tokens"),
    ],
)
def test_a_job_that_got_past_the_api_but_cannot_run_fails_once(service, worker, body, code, param):
    engine = service.engine_pid(worker)
    [job_id] = service.submit(completion(body=body))
    [row] = service.ended(job_id)
    assert row.state == JobState.FAILED
    assert (row.error["code"], row.error["param"]) == (code, param)
    assert row.attempt == 1
    assert service.engine_pid(worker) == engine


def test_cancelling_a_running_job_frees_its_blocks_and_it_never_shows_output(service):
    [job_id] = service.submit(completion(15_000))
    service.running(job_id)
    assert not engine_idle(service)
    service.cancel(job_id)
    service.wait_for(lambda: engine_idle(service))
    service.wait_for(lambda: service.get(job_id).wasted_tokens > 0)
    row = service.get(job_id)
    assert (row.state, row.output, row.completion_tokens) == (JobState.CANCELLED, None, 0)
    [other] = service.submit(completion(20))
    service.ended(other)
    assert service.get(job_id) == row


def test_a_celery_client_can_send_a_whole_job(service):
    [row] = service.ended(generate(service))
    assert row.state == JobState.SUCCEEDED, row.error
    assert row.output["usage"]["completion_tokens"] == 20
    assert row.model == MODEL


JUNK = (
    b"raw junk", b"\xff\xfe\x00bin", b"[]", b"[1, 2]", b"null", b"1", b'"s"', b"{}",
    b"[" * 100_000,
    b'{"body": "!", "properties": {"body_encoding": "base64", "delivery_tag": "t"}}',
    b'{"body": "e30=", "properties": {}, "headers": null}',
)  # fmt: skip
ODD_HEADERS = (
    {"task": {"x": 1}},
    {"task": ["a"]},
    {"task": None},
    {"task": 5},
    {"task": "nobody.knows"},
)
# a job sent with one of these becomes a failed row, which names the header
FAULTY_HEADERS = (
    {"id": {"x": 1}}, {"id": []}, {"id": None}, {"id": ""}, {"id": 7}, {"id": True}, {"id": 1.5},
    {"timelimit": 5}, {"timelimit": []}, {"timelimit": {}}, {"timelimit": "ab"},
    {"timelimit": [1, 2, 3]}, {"eta": 5}, {"eta": []}, {"eta": "soon"}, {"expires": {}},
    {"eta": "9999-12-31T23:59:59"}, {"expires": 1e400}, {"expires": "never"},
    {"expires": "0001-01-01T00:00:00"}, {"group": [1]}, {"group_index": "x"}, {"retries": "many"},
    {"retries": [1]}, {"shadow": {}}, {"shadow": ["x"]}, {"shadow": 5}, {"argsrepr": []},
    {"kwargsrepr": 3}, {"root_id": []}, {"parent_id": {}}, {"origin": {}}, {"stamped_headers": 5},
    {"stamped_headers": [["a"]]}, {"stamps": []}, {"lang": {}}, {"meth": 5},
    {"replaced_task_nesting": []},
)  # fmt: skip
# these are nothing that anybody looks at
IDLE_HEADERS = (
    {"ignore_result": "yes"}, {"chord": 5}, {"callbacks": 5}, {"tokenmill_fault": "none"},
    {"shadow": "other"}, {"retries": 3}, {"timelimit": [None, ["x"]]}, {"properties": 5},
    {"eta": "2020-01-01T00:00:00"}, {"hostname": {}}, {"args": 5},
)  # fmt: skip
ODD_PROPERTIES = (
    {"delivery_tag": {"x": 1}}, {"delivery_tag": None}, {"delivery_tag": 5},
    {"delivery_info": {}}, {"delivery_info": None}, {"delivery_info": {"routing_key": "x"}},
    {"delivery_info": []}, {"priority": "high"}, {"reply_to": {}}, {"correlation_id": []},
    {"body_encoding": "rot13"}, {"body_encoding": {}},
)  # fmt: skip
# no arguments at all: of these nothing but a line in the log can be made
ODD_BODIES = (b"", b"[]", b"{}", b"[[], {}]", b"[[], {}, {}, {}]", b"\xff", b"null")
# arguments that are no job: failed rows
FAULTY_BODIES = (
    b'["a", "b", "c"]', b"[5, 5, 5]", b"[[], {}, 5]", b'{"a": 1, "b": 2, "c": 3}',
    b'[{}, [], {"chord": 5, "callbacks": 5, "errbacks": [5]}]',
)  # fmt: skip


def message(queue, tag, task=GENERATE_TASK, headers=None, properties=None, body=b"[[], {}, {}]"):
    """One of Celery's form, with what is given in it."""
    usual = {"delivery_tag": tag, "body_encoding": "base64",
             "delivery_info": {"exchange": "", "routing_key": queue}}  # fmt: skip
    return json.dumps({
        "body": base64.b64encode(body).decode(),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": task, "id": f"odd-{tag}", "lang": "py"} | (headers or {}),
        "properties": usual | (properties or {}),
    })  # fmt: skip


def odd_messages(queue):
    """Messages with one part that is not Celery's: a valid one's neighbours in form."""
    for task in (GENERATE_TASK, RUN_TASK):
        for i, headers in enumerate((*ODD_HEADERS, *FAULTY_HEADERS, *IDLE_HEADERS)):
            yield message(queue, f"{queue}-{task}-h{i}", task, headers=headers)
        for i, body in enumerate((*ODD_BODIES, *FAULTY_BODIES)):
            yield message(queue, f"{queue}-{task}-b{i}", task, body=body)
    for i, properties in enumerate(ODD_PROPERTIES):
        yield message(queue, f"{queue}-p{i}", properties=properties)
    # in the first version of Celery's protocol all of it is in the body
    for i, headers in enumerate((*FAULTY_HEADERS, *IDLE_HEADERS)):
        if "9999" in str(headers):
            continue  # there it is a job for then
        body = {"task": GENERATE_TASK, "id": f"{queue}-1-{i}", "args": [], "kwargs": {}} | headers
        text = message(queue, f"{queue}-v{i}", body=json.dumps(body).encode())
        yield json.dumps(json.loads(text) | {"headers": {}})


def test_junk_in_the_queues_is_passed_over_and_no_job_is_affected(service, worker):
    engine = service.engine_pid(worker)
    ids = service.submit(*(completion(30) for _ in range(8)))
    with contextlib.closing(connect(service.redis_url)) as redis:
        for queue in (DEFAULT_QUEUE, queue_for(MODEL)):
            redis.lpush(f"{service.settings.key_prefix}{queue}", *JUNK, *odd_messages(queue))
    more = [generate(service) for _ in range(8)]
    for row in service.ended(*ids, *more):
        assert (row.state, row.attempt) == (JobState.SUCCEEDED, 1), row.error
    assert worker.process.poll() is None
    assert service.engine_pid(worker) == engine
    service.wait_for(lambda: service.unacknowledged() == 0)
    assert "WorkerLostError" not in worker.log_text()
    assert "Connection to broker lost" not in worker.log_text()


def rows_by_custom_id(service, prefix):
    query = select(jobs_table.c.id).where(jobs_table.c.custom_id.startswith(prefix))
    with service.database.read() as connection:
        found = list(connection.scalars(query))
    return {row.custom_id: row for row in map(service.get, found)}


def test_a_job_whose_message_is_faulty_around_it_becomes_a_failed_row_that_says_so(service, worker):
    """Whatever the fault, the job itself is in order: its sender asks for it and is told."""
    sent, mark = {}, uuid.uuid4().hex
    job = {"url": "/v1/completions", "body": {"model": MODEL, "prompt": "hi", "max_tokens": 3}}
    with contextlib.closing(connect(service.redis_url)) as redis:
        for i, headers in enumerate((*FAULTY_HEADERS, *IDLE_HEADERS)):
            custom_id = f"{mark}-{i}"
            body = json.dumps([[], job | {"custom_id": custom_id}, {}]).encode()
            sent[custom_id] = headers
            text = message(DEFAULT_QUEUE, custom_id, headers=headers, body=body)
            redis.lpush(f"{service.settings.key_prefix}{DEFAULT_QUEUE}", text)
    service.wait_for(lambda: len(rows_by_custom_id(service, mark)) == len(sent))
    service.ended(*(row.id for row in rows_by_custom_id(service, mark).values()))
    for custom_id, row in rows_by_custom_id(service, mark).items():
        headers = sent[custom_id]
        [name] = headers
        if headers in IDLE_HEADERS:
            assert row.state == JobState.SUCCEEDED, (headers, row.error)
        else:
            assert (row.state, row.error["code"]) == (JobState.FAILED, "invalid_request"), headers
            assert f"header {name} " in row.error["message"]
        if name != "id":
            assert row.id == job_id_of(f"odd-{custom_id}")
    assert worker.process.poll() is None
    service.wait_for(lambda: service.unacknowledged() == 0)


def test_arguments_that_are_no_job_become_a_failed_row(service, worker):
    tags = {f"{uuid.uuid4()}": body for body in FAULTY_BODIES}
    with contextlib.closing(connect(service.redis_url)) as redis:
        for tag, body in tags.items():
            redis.lpush(
                f"{service.settings.key_prefix}{DEFAULT_QUEUE}",
                message(DEFAULT_QUEUE, tag, body=body),
            )
    for row in service.ended(*(job_id_of(f"odd-{tag}") for tag in tags)):
        assert (row.state, row.error["code"]) == (JobState.FAILED, "invalid_request")
    service.wait_for(lambda: service.unacknowledged() == 0)
    assert worker.process.poll() is None


@pytest.mark.parametrize("how", ["link", "link_error", "chain", "chord"])
def test_a_message_that_wants_a_task_called_is_a_failed_row_and_none_is_called(service, how):
    """The called one would be a job with a row of its own."""
    job = {"url": "/v1/completions", "body": {"model": MODEL, "prompt": "hi", "max_tokens": 3}}
    called = service.app.signature(
        GENERATE_TASK, kwargs=job, task_id=str(uuid.uuid4()), queue=DEFAULT_QUEUE, immutable=True
    )
    if how == "chain":
        first = service.app.signature(GENERATE_TASK, kwargs=job, queue=DEFAULT_QUEUE)
        task_id = (first | called).apply_async().parent.id
    else:
        task_id = service.app.send_task(GENERATE_TASK, kwargs=job, **{how: called}).id
    [row] = service.ended(job_id_of(task_id))
    assert (row.state, row.error["code"], row.error["param"]) == ("failed", "invalid_request", how)
    service.ended(generate(service))  # by then it would have been taken
    assert service.find(job_id_of(called.options["task_id"])) is None


@pytest.mark.parametrize("failing", ["accept", "end"])
def test_a_callback_of_celerys_that_raises_costs_only_its_message(failing, caplog):
    rejected = []

    class Request:
        id = "task-1"

        def callback(self, *_):
            raise TypeError(failing)

        def reject(self, requeue):
            rejected.append(requeue)

    pool = EnginePool(app=None)
    after = []
    pool._call_in_hub(functools.partial(pool._contained(Request().callback), 1))
    pool._call_in_hub(lambda: after.append(1))
    pool._run_for_hub()
    assert (rejected, after) == ([False], [1])
    assert "task='task-1' fault=TypeError" in caplog.text


@pytest.mark.parametrize("limit", ["x", [1], {}, True, -1, 0])
def test_a_time_limit_that_is_no_number_of_seconds_limits_nothing(service, worker, limit):
    [row] = service.ended(generate(service, time_limit=limit, soft_time_limit=limit))
    assert row.state == JobState.SUCCEEDED, row.error
    assert worker.process.poll() is None


def test_the_same_message_twice_is_one_job(service):
    task_id = str(uuid.uuid4())
    job = {"url": "/v1/completions", "body": {"model": MODEL, "prompt": "hi", "max_tokens": 5}}
    for _ in range(3):
        service.app.send_task(GENERATE_TASK, kwargs=job, task_id=task_id)
    [row] = service.ended("job_" + task_id.replace("-", ""))
    assert (row.state, row.attempt) == (JobState.SUCCEEDED, 1)


def test_a_whole_job_that_is_invalid_becomes_a_failed_row_that_says_why(service):
    [bad_body, no_job] = [
        generate(service, body={"temperature": -1}),
        generate(service, body={"model": 5, "prompt": "\ud800"}),
    ]
    for row in service.ended(bad_body, no_job):
        assert row.state == JobState.FAILED
        assert row.error["code"] == "invalid_request"
    assert service.get(bad_body).error["param"] == "temperature"


def test_a_whole_job_for_another_workers_model_waits_for_that_worker(service):
    job_id = generate(service, body={"model": "other"})
    service.wait_for(lambda: service.find(job_id) is not None)
    service.wait_for(lambda: service.get(job_id).published_at is not None)
    assert service.get(job_id).state == JobState.QUEUED
    with service.app.connection_for_read() as connection:
        message = connection.SimpleQueue(queue_for("other")).get(timeout=10)
        assert message.headers["id"] == job_id
        message.ack()
    service.cancel(job_id)


def test_every_task_id_has_a_row_of_its_own(service):
    task_ids = [
        "row-1-23", "row-12-3", "2026-1-11", "2026-11-1", "row:17", "a/b", "ключ", "a b", "-----",
        "x" * 60, "x" * 61, "x" * 5000, "job_abc", "job_'; DROP TABLE jobs", "\0", "\ud800",
    ]  # fmt: skip
    mark = uuid.uuid4().hex
    task_ids = [f"{task_id}{mark}" for task_id in task_ids]
    for number, task_id in enumerate(task_ids):
        job = {"url": "/v1/completions", "body": {"model": MODEL, "prompt": "x", "max_tokens": 2},
               "custom_id": str(number)}  # fmt: skip
        service.app.send_task(GENERATE_TASK, kwargs=job, task_id=task_id)
    rows = service.ended(*map(job_id_of, task_ids))
    assert [row.custom_id for row in rows] == [str(number) for number in range(len(task_ids))]
    assert {row.state for row in rows} == {JobState.SUCCEEDED}


def test_a_running_job_is_revoked_by_its_task_id_of_any_kind(service):
    task_id = f"ключ 17/{uuid.uuid4()}"
    body = {"model": MODEL, "prompt": "x", "max_tokens": 15_000, "ignore_eos": True}
    job = {"url": "/v1/completions", "body": body}
    service.app.send_task(GENERATE_TASK, kwargs=job, task_id=task_id)
    service.running(job_id_of(task_id))
    service.app.control.revoke(task_id, terminate=True)
    [row] = service.ended(job_id_of(task_id))
    assert row.state == JobState.CANCELLED
    service.wait_for(lambda: engine_idle(service))


@pytest.mark.parametrize("task_id", ["\0", "x" * 200, "job_'; DROP TABLE jobs", ""])
def test_messages_of_ours_that_name_no_job_are_dropped_and_harm_nobody(service, worker, task_id):
    service.app.send_task(RUN_TASK, args=[task_id], task_id=task_id, queue=queue_for(MODEL))
    [job_id] = service.submit(completion(5))
    [row] = service.ended(job_id)
    assert row.state == JobState.SUCCEEDED
    service.wait_for(lambda: service.unacknowledged() == 0)
    assert worker.process.poll() is None


def test_revoking_a_running_job_cancels_it(service):
    job_id = generate(service, 15_000)
    service.running(job_id)
    task_id = str(uuid.UUID(job_id.removeprefix("job_")))
    service.app.control.revoke(task_id, terminate=True)
    [row] = service.ended(job_id)
    assert (row.state, row.output) == (JobState.CANCELLED, None)
    service.wait_for(lambda: engine_idle(service))


def test_revoking_a_job_that_is_still_a_message_cancels_its_row(service):
    job = completion(20)
    service.app.control.revoke(job.id)
    service.wait_for(lambda: job.id in _revoked(service.app))
    service.submit(job)
    [row] = service.ended(job.id)
    assert (row.state, row.attempt) == (JobState.CANCELLED, 0)


def test_revoking_a_whole_job_that_is_still_a_message_leaves_a_cancelled_row(service, worker):
    """Whatever is in it: it may name another model, or be no job."""
    task_ids = {str(uuid.uuid4()): model for model in (MODEL, "other", 5)}
    service.app.control.revoke(list(task_ids))
    service.wait_for(lambda: set(task_ids) <= set(_revoked(service.app)))
    for task_id, model in task_ids.items():
        job = {"url": "/v1/completions", "body": {"model": model, "prompt": "hi"}}
        service.app.send_task(GENERATE_TASK, kwargs=job, task_id=task_id)
    for row in service.ended(*("job_" + task_id.replace("-", "") for task_id in task_ids)):
        assert (row.state, row.attempt, row.output) == (JobState.CANCELLED, 0, None)
        if row.model == MODEL:
            service.wait_for(lambda id_=row.id: service.get(id_).prompt_tokens > 0)
    assert "Failed to mark" not in worker.log_text()


def _revoked(app: Celery) -> list[str]:
    answers = app.control.inspect(timeout=5, limit=1).revoked() or {}
    return [task_id for ids in answers.values() for task_id in ids]


@pytest.mark.parametrize("limit", ["soft_time_limit", "time_limit"])
def test_time_limits_end_a_job_in_the_engine_too(service, limit):
    job_id = generate(service, 15_000, **{limit: 0.5})
    [row] = service.ended(job_id)
    assert (row.state, row.error["code"]) == (JobState.FAILED, "time_limit")
    assert row.wasted_tokens > 0
    service.wait_for(lambda: engine_idle(service))


def test_monitors_see_the_pool_and_what_it_runs(service):
    job_id = generate(service, 15_000)
    service.running(job_id)
    inspect = service.app.control.inspect(timeout=10, limit=1)
    [stats] = inspect.stats().values()
    assert stats["pool"]["implementation"] == "worker.pool:EnginePool"
    assert stats["pool"]["jobs_running"] == 1
    [active] = inspect.active().values()
    assert [task["name"] for task in active] == [GENERATE_TASK]
    service.cancel(job_id)
    service.ended(job_id)


def test_only_the_engine_process_loads_torch(service, worker):
    [job_id] = service.submit(completion(20))
    service.ended(job_id)
    assert "libtorch" not in mapped_files(worker.pid)
    assert "libtorch" in mapped_files(service.engine_pid(worker))
