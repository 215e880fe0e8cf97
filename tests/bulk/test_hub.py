"""`tokenmill dataset push` against a stand-in for the hub's HTTP API: no machine outside is asked.

The stand-in has what huggingface_hub calls for a commit: the repository made, the mode of each
upload, Git LFS's batch and its PUT, the commit's lines. It is a stand-in: the real hub was not
asked.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pyarrow.parquet as pq
import pytest

from bulk.errors import DatasetError, OutputError
from bulk.hub import push
from bulk.outputs import Outputs
from bulk.runner import Runner
from bulk.spec import read_spec
from bulk.workplace import Workplace
from tests.bulk.service import StandIn

# httpx of how huggingface_hub sends a file
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "someone/facts"


class Hub(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {}  # of the repository
        self.stored = {}  # LFS objects by SHA-256
        self.made = []
        self.titles = []
        self.refuses = False

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if re.fullmatch(rf"/api/datasets/{REPO}/tree/main.*", self.path):
            files = self.server.files
            tree = [
                {"type": "file", "path": name, "size": len(files[name]), "oid": "0" * 40}
                for name in files
            ]
            return self.answer(tree)
        return self.answer({"id": REPO, "sha": "0" * 40, "siblings": []})

    def do_PUT(self):
        content = self.body()
        self.server.stored[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_POST(self):
        body = self.body()
        if self.server.refuses:
            self.answer({"error": "no rights"}, 403)
        elif self.path == "/api/repos/create":
            self.server.made.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/datasets/{REPO}"})
        elif self.path.startswith(f"/api/datasets/{REPO}/preupload/main"):
            named = [each["path"] for each in json.loads(body)["files"]]
            self.answer({"files": [self.mode(name) for name in named]})
        elif self.path == f"/datasets/{REPO}.git/info/lfs/objects/batch":
            asked = json.loads(body)["objects"]
            self.answer({"transfer": "basic", "objects": [self.lfs(each) for each in asked]})
        elif self.path.startswith(f"/api/datasets/{REPO}/commit/main"):
            self.commit([json.loads(line) for line in body.splitlines()])
            url = f"{self.server.url}/datasets/{REPO}/commit/1"
            self.answer({"commitUrl": url, "commitOid": "1" * 40, "success": True})
        else:
            self.answer({"errors": [], "warnings": []})

    @staticmethod
    def mode(name):
        is_large = name.endswith(".parquet")
        return {"path": name, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}

    def lfs(self, asked):
        href = f"{self.server.url}/lfs/{asked['oid']}"
        return asked | {"actions": {"upload": {"href": href, "header": {}}}}

    def commit(self, lines):
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.titles.append(value["summary"])
            elif line["key"] == "file":
                assert value["encoding"] == "base64"
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.stored[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del self.server.files[value["path"]]

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Nothing: the log is the test's output."""


@pytest.fixture
def hub(monkeypatch):
    # what goes over Xet is the hub's own storage protocol: without it, Git LFS
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with Hub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)  # HF_ENDPOINT
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path):
    spec = {
        "model": "tiny", "input": {"path": "in.jsonl"}, "prompt": "Say {{ i }}.",
        "output": {"path": "out", "rows_per_shard": 2, "format": "parquet"},
    }  # fmt: skip
    (tmp_path / "spec.yaml").write_text(json.dumps(spec))
    (tmp_path / "in.jsonl").write_text("".join(f'{{"i": {i}}}\n' for i in range(3)))
    workplace = Workplace(read_spec(tmp_path / "spec.yaml"), tmp_path)
    with workplace.held(), closing(workplace.state(new=True)) as state:
        outputs = Outputs(workplace.spec, state, workplace.folder)
        runner = Runner(
            workplace.spec, tmp_path, state, workplace.hidden, settled=outputs.write_settled
        )
        runner.read(workplace.begin(state))
        runner.run(StandIn())
        workplace.finish(state)
    return workplace.folder


def test_shards_manifest_and_card_are_pushed_whole(hub, folder):
    hub.files["data-00000-of-00009.parquet"] = b"of a push before"
    where = push(folder, REPO, private=True)
    assert where.endswith(f"/datasets/{REPO}/commit/1")
    assert sorted(hub.files) == [
        "README.md", "data-00000-of-00002.parquet", "data-00001-of-00002.parquet", "manifest.json"
    ]  # fmt: skip
    assert all(hub.files[name] == (folder / name).read_bytes() for name in hub.files)
    (made,) = hub.made
    assert (made["type"], made["visibility"]) == ("dataset", "private")
    assert "data_files: data-*" in hub.files["README.md"].decode()
    assert hub.titles[0].startswith("3 samples, spec ")
    assert pq.read_table(folder / "data-00001-of-00002.parquet")["i"].to_pylist() == [2]


def test_a_card_that_is_there_is_kept(hub, folder):
    (folder / "README.md").write_text("my own\n")
    push(folder, REPO, private=False)
    assert hub.files["README.md"] == b"my own\n"


def test_what_is_not_as_its_manifest_says_is_not_pushed(hub, folder):
    shard = folder / "data-00000-of-00002.parquet"
    shard.write_bytes(shard.read_bytes() + b"x")
    with pytest.raises(OutputError, match="is not what the manifest says"):
        push(folder, REPO, private=False)
    manifest = json.loads((folder / "manifest.json").read_text()) | {"complete": False}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(OutputError, match="not complete; --partial pushes"):
        push(folder, REPO, private=False)
    (folder / "manifest.json").unlink()
    with pytest.raises(OutputError, match="has no manifest"):
        push(folder, REPO, private=False)
    assert not hub.files


def test_what_the_hub_says_is_told_in_one_line(hub, folder):
    hub.refuses = True
    with pytest.raises(DatasetError, match=r"someone/facts could not be pushed: .*403") as caught:
        push(folder, REPO, private=False)
    assert "\n" not in str(caught.value)
    with pytest.raises(DatasetError, match="could not be pushed"):
        push(folder, "no/such/name", private=False)
