"""What is wrong with a job is said at the door: 400, naming the field and its bound."""

import json

import pytest

from api.door import Door, ServedModel
from api.errors import BadRequest
from engine.tokenizer import Tokenizer
from tests.api.conftest import MODEL, chat, completion, error_of, serving
from tests.engine.tokenizers_on_disk import byte_level, write
from tests.tiny_llama import MAX_MODEL_LEN, VOCAB_SIZE

HUGE = 10**400


@pytest.fixture(scope="module")
def door(tmp_path_factory, valkey_server, tiny_llama_dir):
    """One server for the whole table: nothing in it is ever stored."""
    from jobs.settings import ModelEntry, Settings
    from migrations import upgrade

    url = f"sqlite:///{tmp_path_factory.mktemp('door') / 'tokenmill.db'}"
    upgrade(url)
    settings = Settings(
        database_url=url,
        redis_url=valkey_server.url,
        models=(ModelEntry(name=MODEL, path=str(tiny_llama_dir)),),
        port=0,
    )
    with serving(settings) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_is_stored(door):
    yield
    assert door.get("/v1/jobs").json()["data"] == []


def refusal(door, content: bytes) -> dict:
    headers = {"content-type": "application/json"}
    reply = door.post("/v1/jobs", content=content, headers=headers)
    assert reply.status_code == 400, reply.text
    error = error_of(reply)
    assert error["type"] == "invalid_request_error"
    return error


BODIES = [
    # values out of bounds: the field, and what the message must say
    (completion(model="gpt-5"), "body.model", MODEL),
    (completion(model=""), "body.model", "empty"),
    (completion(model=None), "body.model", "model"),
    (completion(prompt=""), "body.prompt", "empty"),
    (completion(prompt=[]), "body.prompt", "at least 1"),
    (completion(prompt=[""]), "body.prompt", "empty"),
    (completion(prompt=None), "body.prompt", "prompt"),
    (completion(prompt=["a", "b"]), "body.prompt", "one prompt"),
    (completion(prompt=[-1]), "body.prompt", "-1"),
    (completion(prompt=[5, VOCAB_SIZE]), "body.prompt", str(VOCAB_SIZE)),
    (completion(prompt=[2**31]), "body.prompt", str(VOCAB_SIZE)),
    (completion(prompt=[2**63]), "body.prompt", str(VOCAB_SIZE)),
    (completion(prompt=[1.0]), "body.prompt", "1.0"),
    (completion(prompt=[True]), "body.prompt", "True"),
    (completion(prompt=[None]), "body.prompt", "None"),
    (completion(prompt=[1] * MAX_MODEL_LEN), "body.prompt", str(MAX_MODEL_LEN)),
    (completion(prompt=[1] * 10, max_tokens=MAX_MODEL_LEN), "body.max_tokens", str(MAX_MODEL_LEN)),
    (completion(max_tokens=-1), "body.max_tokens", "[0,"),
    (completion(max_tokens=2**31), "body.max_tokens", "[0,"),
    (completion(max_tokens=4.0), "body.max_tokens", "integer"),
    (completion(temperature=-1), "body.temperature", "[0, 2]"),
    (completion(temperature=1e6), "body.temperature", "[0, 2]"),
    (completion(temperature="NaN"), "body.temperature", "number"),
    (completion(temperature=True), "body.temperature", "number"),
    (completion(structured_outputs={"regex": "(" * 65}), "body.structured_outputs.regex", "64"),
    (completion(structured_outputs={"regex": "a" * 9000}), "body.structured_outputs.regex", "8192"),
    (completion(structured_outputs={"regex": "a", "json": {}}), "body.structured_outputs", "one"),
    (completion(structured_outputs={"choice": []}), "body.structured_outputs.choice", "1 to 1000"),
    (completion(structured_outputs={"json": "{"}), "body.structured_outputs.json", "JSON"),
    (completion(structured_outputs={"regex": "a"}, ignore_eos=True), "body.ignore_eos", "combined"),
    (
        chat(max_tokens=None, max_completion_tokens=999),
        "body.max_completion_tokens",
        str(MAX_MODEL_LEN),
    ),
    (chat(max_tokens=999), "body.max_tokens", str(MAX_MODEL_LEN)),
    (chat(max_tokens=None, max_completion_tokens=-1), "body.max_completion_tokens", "[0,"),
    (chat(response_format={"type": "xml"}), "body.response_format.type", "json_schema"),
    (
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"schema": {"enum": ["a" * 70_000]}},
            }
        ),
        "body.response_format",
        "65536",
    ),
    (chat(guided_json={}), "body.guided_json", "not a field"),
    (completion(top_p=0), "body.top_p", "(0, 1]"),
    (completion(top_p=1.0001), "body.top_p", "(0, 1]"),
    (completion(top_p=1 + 2**-52), "body.top_p", "(0, 1]"),
    (completion(top_k=-2), "body.top_k", "[-1,"),
    (completion(min_p=-0.1), "body.min_p", "[0, 1]"),
    (completion(n=0), "body.n", "[1, 16]"),
    (completion(n=17), "body.n", "[1, 16]"),
    (completion(n=10**6), "body.n", "[1, 16]"),
    (completion(presence_penalty=2.5), "body.presence_penalty", "[-2, 2]"),
    (completion(frequency_penalty=-3), "body.frequency_penalty", "[-2, 2]"),
    (chat(repetition_penalty=0), "body.repetition_penalty", "(0, 2]"),
    (completion(logit_bias={"5": 101}), "body.logit_bias", "[-100, 100]"),
    (completion(logit_bias={"5": 1e308}), "body.logit_bias", "[-100, 100]"),
    (completion(logit_bias={str(VOCAB_SIZE): 1}), "body.logit_bias", str(VOCAB_SIZE)),
    (chat(logit_bias={"five": 1}), "body.logit_bias", "'five'"),
    (
        completion(logit_bias={str(i): 0 for i in range(1025)}),
        "body.logit_bias",
        "at most 1024, got 1025",
    ),
    (completion(allowed_token_ids=[]), "body.allowed_token_ids", "at least 1"),
    (completion(allowed_token_ids=[VOCAB_SIZE]), "body.allowed_token_ids", str(VOCAB_SIZE)),
    (completion(allowed_token_ids=[0] * 1025), "body.allowed_token_ids", "1024"),
    (completion(bad_words=["x"] * 257), "body.bad_words", "256"),
    (completion(bad_words=[""]), "body.bad_words", "non-empty"),
    (completion(skip_special_tokens=1), "body.skip_special_tokens", "true or false"),
    (
        completion(include_stop_str_in_output="no"),
        "body.include_stop_str_in_output",
        "true or false",
    ),
    (completion(timeout_s=0), "body.timeout_s", "(0, "),
    (completion(timeout_s=10**9), "body.timeout_s", "2.592e+06"),
    (completion(thinking_token_budget=5), "body.thinking_token_budget", "<think>"),
    (
        completion(repetition_detection={"max_pattern_size": 65, "min_count": 2}),
        "body.repetition_detection.max_pattern_size",
        "[1, 64]",
    ),
    (
        completion(repetition_detection={"max_pattern_size": 5}),
        "body.repetition_detection.min_count",
        "required",
    ),
    (completion(max_tokens=0), "body.max_tokens", "at least 1"),
    (completion(max_tokens=0, echo=True), "body.max_tokens", "echo with logprobs"),
    (completion(max_tokens=0, logprobs=1), "body.max_tokens", "to be scored"),
    (completion(max_tokens=0, prompt_logprobs=1, n=2), "body.n", "must be 1"),
    (completion(logprobs=21), "body.logprobs", "[0, 20]"),
    (completion(logprobs=-1), "body.logprobs", "[0, 20]"),
    (completion(logprobs=True), "body.logprobs", "integer"),
    (completion(prompt_logprobs=-1), "body.prompt_logprobs", "[0, 20]"),
    (completion(prompt_logprobs=21), "body.prompt_logprobs", "[0, 20]"),
    (completion(echo=1), "body.echo", "true or false"),
    (chat(echo=True), "body.echo", "not a field"),
    (chat(logprobs=3), "body.logprobs", "true or false"),
    (chat(top_logprobs=3), "body.top_logprobs", "needs logprobs"),
    (chat(logprobs=True, top_logprobs=21), "body.top_logprobs", "[0, 20]"),
    (chat(logprobs=True, top_logprobs=-1), "body.top_logprobs", "[0, 20]"),
    (completion(n=True), "body.n", "integer"),
    (completion(seed=-1), "body.seed", "[0,"),
    (completion(seed=2**63), "body.seed", "[0,"),
    (completion(min_tokens=5), "body.min_tokens", "[0, 4]"),
    (completion(stop=[""]), "body.stop", "non-empty"),
    (completion(stop=""), "body.stop", "non-empty"),
    (completion(stop=["x"] * 1000), "body.stop", "16"),
    (completion(stop="x" * 100_000), "body.stop", "256"),
    (completion(stop=["x"] * 17), "body.stop", "16"),
    (completion(stop=["x" * 257]), "body.stop", "256"),
    (completion(stop_token_ids=[VOCAB_SIZE]), "body.stop_token_ids", str(VOCAB_SIZE)),
    (completion(ignore_eos=1), "body.ignore_eos", "true or false"),
    (completion(stream=True), "body.stream", "not supported"),
    (completion(temprature=1), "body.temprature", "not a field"),
    (chat(messages=[]), "body.messages", "1 to"),
    (chat(messages="hello"), "body.messages", "list"),
    (chat(messages=["hello"]), "body.messages[0]", "object"),
    (chat(messages=[{"role": "user"}]), "body.messages[0].content", "string"),
    (chat(messages=[{"role": "user", "content": 5}]), "body.messages[0].content", "string"),
    (chat(messages=[{"role": "king", "content": ""}]), "body.messages[0].role", "one of"),
    (
        chat(messages=[{"role": "user", "content": "a", "mood": "good"}]),
        "body.messages[0].mood",
        "not a field",
    ),
    (
        chat(messages=[{"role": "user", "content": "the fox " * MAX_MODEL_LEN}]),
        "body.messages",
        str(MAX_MODEL_LEN),
    ),
    (chat(prompt="hello"), "body.prompt", "not a field"),
    (
        chat(tools=[{"type": "function", "function": {"name": "f"}}]),
        "body.tools",
        "shows no format of tool calls",
    ),
    (chat(tools=[{"type": "function"}]), "body.tools[0].function", "object"),
    (chat(chat_template="{{ 1 }}"), "body.chat_template", "not a field"),
    (
        chat(chat_template_kwargs={"enable_thinking": False}),
        "body.chat_template_kwargs.enable_thinking",
        "has no enable_thinking",
    ),
    # the envelope
    ({"url": "/v1/completions"}, "body", "required"),
    ({"body": completion()["body"]}, "url", "required"),
    (completion() | {"url": "/v1/embeddings"}, "url", "/v1/completions"),
    (completion() | {"url": 5}, "url", "/v1/completions"),
    (completion() | {"body": []}, "body", "object"),
    (completion() | {"method": "GET"}, "method", "POST"),
    (completion() | {"colour": "red"}, "colour", "not a field"),
    (completion() | {"priority": 11}, "priority", "10"),
    (completion() | {"priority": -11}, "priority", "-10"),
    (completion() | {"priority": 1.0}, "priority", "integer"),
    (completion() | {"priority": True}, "priority", "integer"),
    (completion() | {"priority": None}, "priority", "integer"),
    (completion() | {"deadline_s": 0}, "deadline_s", "greater than 0"),
    (completion() | {"deadline_s": -5}, "deadline_s", "greater than 0"),
    (completion() | {"deadline_s": 10**9}, "deadline_s", "2592000"),
    (completion() | {"deadline_s": "60"}, "deadline_s", "number"),
    (completion() | {"max_attempts": 0}, "max_attempts", "1"),
    (completion() | {"max_attempts": 101}, "max_attempts", "100"),
    (completion() | {"retry_on": "engine_crash"}, "retry_on", "list"),
    (completion() | {"retry_on": ["colour"]}, "retry_on[0]", "engine_crash"),
    (completion() | {"retry_on": ["engine_crash"] * 9}, "retry_on", "6"),
    (completion() | {"custom_id": ""}, "custom_id", "1 character"),
    (completion() | {"custom_id": "é" * 129}, "custom_id", "256 bytes"),
    (completion() | {"custom_id": 5}, "custom_id", "string"),
    (completion() | {"metadata": []}, "metadata", "object"),
    (completion() | {"metadata": {"k": 1}}, "metadata.k", "string"),
    (completion() | {"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 65, "64"),
    (completion() | {"metadata": {"k": "v" * 513}}, "metadata.k", "512"),
    (completion() | {"metadata": {str(i): "v" for i in range(17)}}, "metadata", "16"),
]


@pytest.mark.parametrize(("job", "param", "says"), BODIES)
def test_a_bad_value_is_refused_by_name(door, job, param, says):
    error = refusal(door, json.dumps(job).encode())
    assert error["param"] == param
    assert says in error["message"]


def test_a_hundred_thousand_biases_are_counted_not_read(door):
    job = completion(logit_bias={str(i): 0 for i in range(100_000)})
    error = refusal(door, json.dumps(job, separators=(",", ":")).encode())
    assert error["param"] == "body.logit_bias"
    assert "at most 1024, got 100000" in error["message"]


def raw(value: str, *, at: str = "temperature") -> bytes:
    job = json.dumps(completion(**{at: "PLACE"}))
    return job.replace('"PLACE"', value).encode()


JSON = [
    (raw("NaN"), "body.temperature"),
    (raw("-Infinity"), "body.temperature"),
    (raw("1e999"), "body.temperature"),
    (raw('{"5": NaN}', at="logit_bias"), 'body.logit_bias["5"]'),
    (raw(f"{HUGE}"), "body.temperature"),
    (raw("1" * 5000, at="seed"), "body.seed"),
    (raw("[" * 31 + "]" * 31, at="prompt"), "body.prompt" + "[0]" * 30),
    (raw("[" * 100_000 + "]" * 100_000, at="prompt"), None),
    (raw('{"a":' * 20_000 + "1" + "}" * 20_000, at="metadata"), None),
    (raw('"\\ud800"', at="prompt"), "body.prompt"),
    (raw('"\\u0000"', at="prompt"), "body.prompt"),
    (raw('1, "temperature": 2'), "body.temperature"),
    (b'{"url": "/v1/completions", "url": "/v1/completions", "body": {}}', "url"),
    (b"", None),
    (b"{", None),
    (b"\xff\xfe", None),
    (b'{"url": "\xc3\x28"}', None),
    (b"5", None),
    (b'"a job"', None),
    (b"null", None),
    (b"[5]", "[0]"),
    (b"[[]]", "[0]"),
]


UNKNOWN = [
    (completion() | {"colour": "red"}, "colour"),
    (completion(temprature=1), "body.temprature"),
    (chat(temprature=1), "body.temprature"),
    (chat(prompt="hello"), "body.prompt"),
    (chat(messages=[{"role": "user", "content": "x", "text": "y"}]), "body.messages[0].text"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x", "y": 1}]}]),
        "body.messages[0].content[0].y",
    ),
    (
        completion(repetition_detection={"max_pattern_size": 5, "min_count": 2, "x": 1}),
        "body.repetition_detection.x",
    ),
    (
        completion(structured_outputs={"regex": "a", "colour": "red"}),
        "body.structured_outputs.colour",
    ),
    (completion(response_format={"type": "text", "x": 1}), "body.response_format.x"),
]


@pytest.mark.parametrize(("job", "param"), UNKNOWN, ids=[param for _, param in UNKNOWN])
def test_an_unknown_field_has_one_code_wherever_it_stands(door, job, param):
    error = refusal(door, json.dumps(job).encode())
    assert (error["param"], error["code"]) == (param, "unknown_field")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400])
@pytest.mark.parametrize(
    ("option", "bound"),
    [
        ("temperature", "temperature must be in [0, 2]"),
        ("top_p", "top_p must be in (0, 1]"),
        ("timeout_s", "timeout_s must be in (0, 2.592e+06]"),
    ],
)
def test_a_value_that_is_no_number_is_refused_with_the_fields_bound(door, option, bound, value):
    for content, place in (
        (raw(value, at=option), ""),
        (b"[" + raw(value, at=option) + b"]", "[0]."),
    ):
        error = refusal(door, content)
        assert error["param"] == f"{place}body.{option}"
        assert error["message"].startswith(f"{place}body.{option}: ")
        assert error["message"].endswith(f"; {bound}")


@pytest.mark.parametrize("content", [raw("NaN", at="seed"), raw('1, "temperature": 2')])
def test_other_faults_of_json_name_no_bound(door, content):
    assert "must be" not in refusal(door, content)["message"]


@pytest.mark.parametrize(("content", "param"), JSON)
def test_json_that_two_readers_may_read_differently_is_refused(door, content, param):
    error = refusal(door, content)
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"content-type": "text/plain"}, "content-type"),
        ({"content-type": "application/x-www-form-urlencoded"}, "content-type"),
        ({"content-type": "multipart/form-data; boundary=x"}, "content-type"),
        ({"content-type": "application/json; charset=latin-1"}, "content-type"),
        ({"content-type": ""}, "content-type"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, "content-encoding"),
    ],
)
def test_another_content_type_is_refused(door, headers, param):
    content = json.dumps(completion()).encode()
    reply = door.post("/v1/jobs", content=content, headers=headers)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param


@pytest.mark.parametrize("same", [True, False], ids=["the same", "another"])
@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("Idempotency-Key", "key-1", "key-2"),
        ("Content-Type", "application/json", "text/plain"),
        ("Content-Encoding", "identity", "gzip"),
    ],
)
def test_a_header_given_twice_is_refused_by_name(door, name, value, other, same):
    headers = {"Content-Type": "application/json"} | {name: value}
    pairs = [*headers.items(), (name.upper(), value if same else other)]
    content = json.dumps(completion()).encode()
    reply = door.post("/v1/jobs", content=content, headers=pairs)
    assert reply.status_code == 400
    error = error_of(reply)
    assert error["param"] == name.lower()
    assert error["message"] == f"{name.lower()} must be given once"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("status=done", "status"),
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=ten", "limit"),
        ("limit=1.0", "limit"),
        ("limit=%2B1", "limit"),
        ("limit=1_0", "limit"),
        ("limit=%D9%A1", "limit"),  # an Arabic 1
        ("limit=" + "9" * 5000, "limit"),
        ("limit=", "limit"),
        ("limit", "limit"),
        ("limit=1&limit=2", "limit"),
        ("limit=1&limit=1", "limit"),
        ("status=queued&status=running", "status"),
        ("status=QUEUED", "status"),
        ("colour=red", "colour"),
        ("Limit=1", "Limit"),
        ("custom_id=", "custom_id"),
        ("custom_id=%00", "custom_id"),
        ("custom_id=" + "x" * 257, "custom_id"),
        ("after=job_nobody", "after"),
    ],
)
def test_a_bad_filter_is_refused_by_name(door, query, param):
    reply = door.get(f"/v1/jobs?{query}")
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param


@pytest.mark.parametrize("wait", ["-1", "61", "NaN", "inf", "soon", "", "1e1", "1&wait=2"])
def test_a_wait_is_0_to_60_seconds(door, wait):
    reply = door.get(f"/v1/jobs/job_x?wait={wait}")
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "wait"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/jobs/job_x/events"),
        ("POST", "/v1/jobs/job_x/cancel"),
        ("POST", "/v1/jobs"),
    ],
)
def test_a_path_without_parameters_takes_none(door, method, path):
    reply = door.request(method, f"{path}?wait=1")
    assert reply.status_code == 400
    assert error_of(reply)["param"] == "wait"


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=0", "limit must be an integer in [1, 1000], got '0'"),
        ("limit=1&limit=2", "limit must be given once"),
        ("status=done", "must be one of queued, running, succeeded, failed, cancelled, expired"),
        ("custom_id=%00", "custom_id must have 1 to 256 characters, none of them NUL"),
        ("colour=red", "there are: status, model, batch_id, custom_id, limit, after"),
    ],
)
def test_a_bad_filters_bound_is_said_in_our_words(door, query, says):
    assert says in error_of(door.get(f"/v1/jobs?{query}"))["message"]


@pytest.mark.parametrize(("job", "param", "says"), BODIES)
def test_no_librarys_wording_is_shown(door, job, param, says):
    message = refusal(door, json.dumps(job).encode())["message"]
    for words in (
        "Input ",
        "Value error",
        "Extra inputs",
        "should",
        "Field required",
        "type=",
        "valid di",
    ):
        assert words not in message


def test_a_chat_for_a_model_without_a_template_is_a_400_with_its_code(tmp_path):
    folder = write(tmp_path, byte_level(), template=None)
    model = ServedModel(name="base", tokenizer=Tokenizer.load(folder), max_model_len=64, created=0)
    body = {"model": "base", "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(BadRequest) as refused:
        Door({"base": model}).check("/v1/chat/completions", body)
    assert (refused.value.param, refused.value.code) == ("messages", "no_chat_template")
