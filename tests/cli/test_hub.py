"""Fetching from a hub: a server on this machine that answers as the Hugging Face hub does."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

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
        if path.startswith(f"/api/models/someone/Tiny/tree/{COMMIT}"):
            self.send(json.dumps(list(self.server.tree())).encode(), with_body)
        elif path.startswith("/api/models/someone/Tiny"):
            info = {"id": "someone/Tiny", "sha": COMMIT, "siblings": list(self.server.siblings())}
            self.send(json.dumps(info).encode(), with_body)
        elif path.startswith(f"/someone/Tiny/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            if with_body:
                self.server.sent.append(name)
            self.send(self.server.files[name], with_body)
        else:
            self.send_error(404)

    def send(self, content, with_body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

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


def fetch(hub, data_dir, source):
    # in a process of its own: huggingface_hub reads HF_ENDPOINT when it is imported
    environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(data_dir / "hf"), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "cli.main", "models", "fetch", source, "--data-dir", str(data_dir)],
        cwd=REPOSITORY,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
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


def test_an_id_the_hub_does_not_know_is_named(hub, tmp_path):
    done = fetch(hub, tmp_path, "someone/else")
    assert done.returncode == 1
    assert "the hub did not give someone/else" in done.stderr
