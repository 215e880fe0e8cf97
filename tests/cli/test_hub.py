"""Fetching from a hub: a server on this machine that answers as the Hugging Face hub does."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cli.addresses import free_port
from tests.conftest import REPOSITORY

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves one repository, `someone/Tiny`: the files of a folder, and a pickle beside them."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.files["pytorch_model.bin"] = b"a pickle"
        self.stated_sha256 = hashlib.sha256(self.files["model.safetensors"]).hexdigest()
        self.sent = []
        self.refusal = None  # of everything: a status and its X-Error-Code
        self.cut = False  # each file breaks off

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def siblings(self):
        for name, content in self.files.items():
            sibling = {"rfilename": name, "size": len(content), "blobId": "0" * 40}
            if name == "model.safetensors":
                sibling["lfs"] = {"sha256": self.stated_sha256, **self.lfs_sizes(content)}
            yield sibling

    def tree(self):
        for name, content in self.files.items():
            entry = {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            if name == "model.safetensors":
                entry["lfs"] = {"oid": self.stated_sha256, **self.lfs_sizes(content)}
            yield entry

    @staticmethod
    def lfs_sizes(content):
        return {"size": len(content), "pointerSize": 134}


class HubHandler(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def answer(self, with_body):
        path = self.path.partition("?")[0]
        if self.server.refusal is not None:
            status, code = self.server.refusal
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif path.startswith(f"/api/models/someone/Tiny/tree/{COMMIT}"):
            self.send(json.dumps(list(self.server.tree())).encode(), with_body)
        elif path.startswith("/api/models/someone/Tiny"):
            info = {"id": "someone/Tiny", "sha": COMMIT, "siblings": list(self.server.siblings())}
            self.send(json.dumps(info).encode(), with_body)
        elif path.startswith(f"/someone/Tiny/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            if with_body:
                self.server.sent.append(name)
            self.send(self.server.files[name], with_body, cut=self.server.cut)
        else:
            self.send_error(404)

    def send(self, content, with_body, cut=False):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(content[: len(content) // 2] if cut else content)
            self.close_connection = True

    def log_message(self, *args):
        """Nothing: the log is the test's output."""


@pytest.fixture
def hub(tiny_llama_dir):
    with Hub(tiny_llama_dir) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def fetch(hub, data_dir, source, **options):
    return fetch_from(hub.url, data_dir, source, **options)


def fetch_from(url, data_dir, source, **options):
    # in a process of its own: huggingface_hub reads HF_ENDPOINT when it is imported
    environ = {"HF_ENDPOINT": url, "HF_HOME": str(data_dir / "hf"), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "cli.main", "models", "fetch", source, "--data-dir", str(data_dir)],
        cwd=REPOSITORY,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


def test_a_hub_id_becomes_a_checkpoint_of_one_revision_without_its_pickles(hub, tmp_path):
    done = fetch(hub, tmp_path, "someone/Tiny")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "models" / "tiny"
    assert done.stdout.strip() == str(folder)
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    origin = json.loads((folder / "origin.json").read_text())
    assert origin == {"hub_id": "someone/Tiny", "revision": COMMIT}
    assert "pytorch_model.bin" not in hub.sent
    assert {file.name for file in folder.iterdir()} == hub.files.keys() - {"pytorch_model.bin"} | {
        "origin.json"
    }


def test_a_file_that_is_not_what_the_hub_says_is_refused(hub, tmp_path):
    hub.stated_sha256 = "0" * 64
    done = fetch(hub, tmp_path, "someone/Tiny")
    assert done.returncode == 1
    assert "model.safetensors has sha256" in done.stderr
    assert not (tmp_path / "models" / "tiny").exists()


def said_in_one_line(done, tmp_path, *words):
    """Exit status 1, no trace of Python's, the reason at the end, and nothing left half-done."""
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert all(word in last for word in words), done.stderr
    assert list((tmp_path / "models").glob("[!.]*")) == []


def test_an_id_the_hub_does_not_know_is_named(hub, tmp_path):
    done = fetch(hub, tmp_path, "someone/else")
    said_in_one_line(done, tmp_path, "the hub did not give someone/else")


def test_a_machine_without_a_network_is_told_in_one_line(tmp_path):
    done = fetch_from(f"http://127.0.0.1:{free_port()}", tmp_path, "Qwen/Qwen3-0.6B")
    said_in_one_line(done, tmp_path, "the hub did not give Qwen/Qwen3-0.6B", "refused")
    assert done.stderr.count("\n") <= 2, done.stderr


@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ((404, "RepoNotFound"), "there is no such model, or it is private"),
        ((403, "GatedRepo"), "its owner asks for consent"),
        ((401, ""), "401"),
        ((418, ""), "418"),
    ],
)
def test_what_the_hub_refuses_is_named_with_its_reason(hub, tmp_path, refusal, reason):
    hub.refusal = refusal
    done = fetch(hub, tmp_path, "someone/Tiny")
    said_in_one_line(done, tmp_path, "the hub did not give someone/Tiny", reason)


def test_a_download_that_breaks_off_is_named(hub, tmp_path):
    hub.cut = True
    done = fetch(hub, tmp_path, "someone/Tiny")
    said_in_one_line(done, tmp_path, "the hub did not give someone/Tiny")


def test_an_id_that_the_hub_cannot_have_is_named(hub, tmp_path):
    done = fetch(hub, tmp_path, "someone/a--b")
    said_in_one_line(done, tmp_path, "someone/a--b")


def test_a_full_disk_is_not_laid_to_the_hub(hub, tmp_path):
    def limit():  # as a full disk: to write more is an error
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    assert len(hub.files["model.safetensors"]) > 100_000
    done = fetch(hub, tmp_path, "someone/Tiny", preexec_fn=limit)
    said_in_one_line(done, tmp_path, "someone/Tiny cannot be put into", "File too large")
