"""The commands' client against whatever may answer, and whatever a command line may hold."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from cli import client
from cli.client import Client, ClientError, Refused
from cli.client_commands import _submit_all, submit
from cli.main import tokenmill

Answer = tuple[int, object]  # status; an object as JSON, bytes as they are
NOT_UTF8 = "\udcff"  # as Python reads the byte 0xff of a command line


@contextmanager
def service(answer: Callable[[str, bytes], Answer]) -> Iterator[str]:
    """Address of a server that answers each call as `answer(path, body)` says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, value = answer(self.path, body)
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(message: str, param: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": "t", "param": param, "code": None}}


@pytest.mark.parametrize("url", [f"http://{NOT_UTF8}", "http://[::1", "http://x:y", "\0"])
def test_an_address_that_is_none_is_said_in_one_line(url):
    done = CliRunner().invoke(tokenmill, ["status", "--url", url])
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert "is not the address of a service" in done.output


@pytest.mark.parametrize(
    "options",
    [
        ["-p", f"hi {NOT_UTF8}"],
        ["-p", "hi", "--system", NOT_UTF8],
        ["-p", "hi", "--temperature", "nan"],
        ["-p", "hi", "--model", NOT_UTF8],
    ],
    ids=["prompt", "system", "temperature", "model"],
)
def test_what_json_cannot_hold_is_sent_for_the_service_to_refuse(options):
    bodies = []

    def answer(path: str, body: bytes) -> Answer:
        if path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        bodies.append(body)
        return 400, refusal("no", "[0].body.x")

    with service(answer) as url:
        done = CliRunner().invoke(tokenmill, ["submit", "--url", url, *options])
    assert (done.exit_code, done.output) == (1, "Error: no (body.x)\n")
    assert b"NaN" in bodies[0] or b"\\udcff" in bodies[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"body": {"temperature": NaN}}', "body.temperature: NaN is not a JSON number"),
        (b'{"body": {"prompt": "\\ud800"}}', "body.prompt: holds half of a surrogate pair"),
        (b'{"body": {"prompt": "\xff"}}', "not UTF-8 at byte 21"),
        (b'{"body": {"n": 1, "n": 2}}', "body.n: given twice in one object"),
        (b'{"body": {"seed": ' + b"9" * 5000 + b"}}", "body.seed: an integer of 5000 digits"),
        (b"[" * 50_000, "nested more than"),
    ],
)
def test_a_line_that_the_service_would_not_read_is_named_before_anything_is_sent(line, said):
    with service(lambda path, body: (200, {"data": [{"id": "m"}]})) as url:
        lines = b'{"body": {}}\n\n' + line + b"\n[]\n"
        done = CliRunner().invoke(tokenmill, ["submit", "--url", url, "-f", "-"], input=lines)
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: line 3: {said}")
    assert "\nline 4: not a job" in done.output


@pytest.mark.parametrize("key", ["", "é", NOT_UTF8, "a\nb", "x" * 256])
def test_an_idempotency_key_that_would_not_arrive_is_wrong_usage(key):
    done = CliRunner().invoke(submit, ["-p", "hi", "--idempotency-key", key])
    assert done.exit_code == 2
    assert "must be 1 to 255 printable ASCII characters" in done.output


@pytest.mark.parametrize("job_id", ["../../health/ready", "a?b#c", "%2F", NOT_UTF8, "job 1"])
def test_an_id_stays_one_part_of_the_path(job_id):
    paths = []

    def answer(path: str, body: bytes) -> Answer:
        paths.append(path)
        return 404, refusal("no job")

    with service(answer) as url, Client(url) as caller, pytest.raises(Refused):
        caller.job(job_id)
    [path] = paths
    part = path.removeprefix("/v1/jobs/").partition("?")[0]
    assert not set(part) & set("/?# ")


@pytest.mark.parametrize(
    "content", [b"<html>", b"", b"[]", b"{}", b'{"data": 5}', b'{"data": [5]}']
)
@pytest.mark.parametrize(
    "command", [["status"], ["submit", "-p", "hi"], ["submit", "-p", "hi", "--model", "m"]]
)
def test_another_program_at_the_address_is_no_service(content, command):
    with service(lambda path, body: (200, content)) as url:
        done = CliRunner().invoke(tokenmill, [*command, "--url", url])
    assert done.exit_code == 1
    assert done.output == f"Error: {url} does not answer as a Tokenmill service does\n"


def test_a_service_that_cannot_answer_for_a_while_is_waited_for(monkeypatch):
    monkeypatch.setattr(client, "AWAY_PAUSE_S", 0.0)
    answers = [
        (503, refusal("the database does not answer")),
        (429, refusal("too many clients wait")),
        (502, b"Bad Gateway"),
        (200, {"id": "job_1", "status": "running"}),
        (200, {"id": "job_1", "status": "succeeded"}),
    ]
    with service(lambda path, body: answers.pop(0)) as url, Client(url) as caller:
        assert caller.wait(["job_1"])["job_1"]["status"] == "succeeded"
    assert answers == []


@pytest.mark.parametrize(
    "message", ["job 0: n must be 1", "[0].body.n: n must be 1", "n must be 1"]
)
def test_the_index_of_the_only_job_is_not_shown(message):
    with service(lambda path, body: (400, refusal(message, "[0].body.n"))) as url:
        done = CliRunner().invoke(tokenmill, ["submit", "-p", "hi", "--model", "m", "--url", url])
    assert (done.exit_code, done.output) == (1, "Error: n must be 1 (body.n)\n")


def test_a_job_that_is_gone_is_not_waited_for():
    with (
        service(lambda path, body: (404, refusal("no job"))) as url,
        Client(url) as caller,
        pytest.raises(Refused, match="no job"),
    ):
        caller.wait(["job_1"])


def test_what_was_accepted_before_a_call_that_failed_is_told(monkeypatch):
    monkeypatch.setattr("cli.client_commands.MOST_JOBS_PER_CALL", 2)
    answers = [(202, {"data": [{"id": "job_1"}, {"id": "job_2"}]}), (503, refusal("away"))]
    jobs = {f"line {n}: ": {"body": {}} for n in (1, 2, 3)}
    with (
        service(lambda path, body: answers.pop(0)) as url,
        Client(url) as caller,
        pytest.raises(ClientError, match=r"^503 away; the 2 jobs before were accepted$"),
    ):
        _submit_all(caller, jobs, None)
