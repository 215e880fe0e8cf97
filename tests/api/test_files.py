"""Files over HTTP: kept whole or not at all, in bounded memory, each tenant its own."""

import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from api import upload as upload_module
from jobs import file_store
from jobs.database import Database
from jobs.files import FileRecord, add
from tests.api.conftest import error_of, process, serving
from tests.api.test_guard import door  # noqa: F401  a server that asks for keys
from worker.file_sweeper import FileSweeper

LINE = b'{"custom_id": "1"}\n'


@pytest.fixture
def kept(settings, tmp_path):
    return replace(settings, files_dir=str(tmp_path / "files"))


@pytest.fixture
def sqlite_kept(sqlite_settings, tmp_path):
    return replace(sqlite_settings, files_dir=str(tmp_path / "files"))


def upload(client, content=LINE, *, filename="rows.jsonl", **fields):
    fields = {"purpose": "batch"} | fields
    return client.post("/v1/files", data=fields, files={"file": (filename, content)})


def on_disk(settings):
    folder = settings.files_dir
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def test_a_file_is_uploaded_listed_read_and_deleted(kept):
    content = os.urandom(3_000_000)
    with serving(kept) as client:
        made = upload(client, content).json()
        assert re.fullmatch(r"file-[0-9a-z]{26}", made["id"])
        assert made == {
            "id": made["id"], "object": "file", "bytes": len(content), "purpose": "batch",
            "created_at": made["created_at"], "expires_at": made["created_at"] + 2_592_000,
            "filename": "rows.jsonl", "status": "processed",
        }  # fmt: skip
        assert client.get(f"/v1/files/{made['id']}").json() == made
        reply = client.get(f"/v1/files/{made['id']}/content")
        assert reply.content == content
        assert on_disk(kept) == [made["id"]]
        assert client.get("/v1/files").json()["data"] == [made]
        gone = client.delete(f"/v1/files/{made['id']}").json()
        assert gone == {"id": made["id"], "object": "file", "deleted": True}
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            reply = client.request(method, f"/v1/files/{made['id']}{path}")
            assert (reply.status_code, error_of(reply)["code"]) == (404, "file_not_found")
    assert on_disk(kept) == []


def test_files_are_listed_page_by_page_in_both_orders(sqlite_kept):
    with serving(sqlite_kept) as client:
        ids = [upload(client).json()["id"] for _ in range(5)]
        for order, expected in (("asc", ids), ("desc", ids[::-1])):
            seen, query = [], {"limit": 2, "order": order, "purpose": "batch"}
            while True:
                page = client.get("/v1/files", params=query).json()
                seen += [each["id"] for each in page["data"]]
                if not page["has_more"]:
                    break
                query["after"] = page["last_id"]
            assert seen == expected
        assert client.get("/v1/files", params={"purpose": "batch_output"}).json()["data"] == []
        reply = client.get("/v1/files", params={"after": "file-none"})
        assert error_of(reply)["param"] == "after"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": ["batch", "batch"]}, "purpose"),
        ({"colour": "red"}, "colour"),
        ({"expires_after[seconds]": "3600"}, "expires_after.anchor"),
        ({"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
        (
            {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
            "expires_after.seconds",
        ),
        ({"purpose": "x" * 2000}, "purpose"),
    ],
)
def test_a_field_that_is_wrong_is_named_and_nothing_is_left(sqlite_kept, fields, param):
    with serving(sqlite_kept) as client:
        reply = upload(client, **fields)
        assert (reply.status_code, error_of(reply)["param"]) == (400, param)
        assert client.get("/v1/files").json()["data"] == []
    assert on_disk(sqlite_kept) == []


@pytest.mark.parametrize(
    "body",
    [
        b"no form",
        b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n',
        b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\nrows\r\n--x--\r\n',
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\ncut short',
        b"--x\r\ncontent-type: text/plain\r\n\r\nrows\r\n--x--\r\n",
        b"".join(
            b'--x\r\ncontent-disposition: form-data; name="%d"\r\n\r\n1\r\n' % i for i in range(20)
        ),
        b'--x\r\ncontent-disposition: form-data; name="file"; filename=""\r\n\r\n1\r\n--x--\r\n',
    ],
)
def test_what_is_no_upload_is_a_400_and_leaves_nothing(sqlite_kept, body):
    headers = {"content-type": "multipart/form-data; boundary=x"}
    with serving(sqlite_kept) as client:
        reply = client.post("/v1/files", content=body, headers=headers)
        assert reply.status_code == 400, reply.text
        error_of(reply)
        for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary="):
            reply = client.post("/v1/files", content=body, headers={"content-type": kind})
            assert error_of(reply)["param"] == "content-type"
    assert on_disk(sqlite_kept) == []


def test_a_name_is_shown_and_leads_nowhere(sqlite_kept):
    with serving(sqlite_kept) as client:
        for name in ("../../etc/passwd", "..\\evil", "/tmp/x", "名前.jsonl"):
            made = upload(client, filename=name).json()
            assert made["filename"] == name.replace("\\", "/").rpartition("/")[2]
        for odd in ("../secret", "file-" + "0" * 25 + "/", "file-" + "A" * 26):
            assert client.get(f"/v1/files/{odd}/content").status_code == 404
    assert all(re.fullmatch(r"file-[0-9a-z]{26}", name) for name in on_disk(sqlite_kept))


def test_a_file_over_the_cap_is_refused_declared_or_not(sqlite_kept):
    settings = replace(sqlite_kept, max_file_bytes=100_000)
    with serving(settings) as client:
        assert upload(client, b"x" * 100_000).status_code == 200
        for size in (100_001, 3_000_000):
            reply = upload(client, b"x" * size)
            assert (reply.status_code, error_of(reply)["code"]) == (413, "file_too_large")
        begin = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'

        def chunks():
            yield begin
            for _ in range(30):
                yield b"x" * 10_000

        headers = {"content-type": "multipart/form-data; boundary=x"}
        reply = client.post("/v1/files", content=chunks(), headers=headers)
        assert (reply.status_code, error_of(reply)["code"]) == (413, "file_too_large")
    assert len(on_disk(settings)) == 1


def test_an_upload_that_breaks_off_leaves_nothing(sqlite_kept):
    with serving(sqlite_kept) as client:
        url = client.base_url
        begin = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        with socket.create_connection((url.host, url.port)) as connection:
            connection.sendall(
                b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9000000\r\n"
                b"content-type: multipart/form-data; boundary=x\r\n\r\n" + begin + b"x" * 2_000_000
            )
            end = time.monotonic() + 10
            while not on_disk(sqlite_kept) and time.monotonic() < end:
                time.sleep(0.01)
            [name] = on_disk(sqlite_kept)
            assert name.startswith(".tmp-")
        while on_disk(sqlite_kept):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_sender_that_falls_silent_is_given_up(sqlite_kept, monkeypatch):
    monkeypatch.setattr(upload_module, "PAUSE_S", 0.2)

    def chunks():
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        time.sleep(1)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    with serving(sqlite_kept) as client:
        reply = client.post("/v1/files", content=chunks(), headers=headers)
        assert (reply.status_code, error_of(reply)["code"]) == (408, "slow")
    assert on_disk(sqlite_kept) == []


def test_memory_does_not_grow_with_the_file(sqlite_kept):
    size = 60_000_000
    begin = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
    end = b'\r\n--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n'

    def chunks():
        yield begin
        for _ in range(size // 100_000):
            yield b"x" * 100_000
        yield end

    def peak_kib(pid):
        with open(f"/proc/{pid}/status") as status:
            return int(re.search(r"VmHWM:\s+(\d+)", status.read())[1])

    headers = {"content-type": "multipart/form-data; boundary=x"}
    with process(sqlite_kept) as (client, child):
        upload(client, b"x" * 2_000_000)
        before = peak_kib(child.pid)
        reply = client.post("/v1/files", content=chunks(), headers=headers)
        assert reply.json()["bytes"] == size
        with client.stream("GET", f"/v1/files/{reply.json()['id']}/content") as content:
            assert sum(map(len, content.iter_raw())) == size
        assert peak_kib(child.pid) - before < 20_000


def test_the_quota_of_stored_bytes_admits_exactly_what_fits(door, sqlite_settings):  # noqa: F811
    door.client.headers.update(door.key("acme"))
    admin = door.key(scopes=["admin"])
    changed = door.client.post(
        "/admin/v1/tenants/acme", json={"max_stored_bytes": 10_000}, headers=admin
    )
    assert changed.status_code == 200, changed.text
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda _: upload(door.client, b"x" * 4_000), range(8)))
    made = [reply.json()["id"] for reply in replies if reply.status_code == 200]
    refused = [reply for reply in replies if reply.status_code == 429]
    assert (len(made), len(refused)) == (2, 6)
    assert error_of(refused[0])["code"] == "max_stored_bytes"
    assert refused[0].headers["x-should-retry"] == "false"
    door.client.delete(f"/v1/files/{made[0]}")
    assert upload(door.client, b"x" * 4_000).status_code == 200


def test_another_tenants_file_is_not_there(door):  # noqa: F811
    ours, theirs = door.key("acme"), door.key("globex")
    door.client.headers.update(ours)
    made = upload(door.client).json()["id"]
    door.client.headers.update(theirs)
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        reply = door.client.request(method, f"/v1/files/{made}{path}")
        assert error_of(reply)["code"] == "file_not_found"
    assert door.client.get("/v1/files").json()["data"] == []
    assert error_of(door.client.get("/v1/files", params={"after": made}))["param"] == "after"
    door.client.headers.update(ours)
    assert door.client.get(f"/v1/files/{made}").status_code == 200


def test_what_is_over_and_what_has_no_row_is_swept(sqlite_kept, monkeypatch):
    database = Database(sqlite_kept.database_url)
    store = file_store.FileStore(sqlite_kept.files_dir)
    sweeper = FileSweeper(sqlite_kept, database)
    sweeper.sweep()  # no folder yet

    def keep(letter, *, expires_in=None, row=True):
        incoming, file_id = store.incoming(), "file-" + letter * 26
        incoming.write(LINE)
        incoming.keep(file_id)
        with database.begin() as connection:
            now = database.clock(connection)
            if row:
                record = FileRecord(
                    id=file_id, tenant_id="default", filename="a", purpose="batch", bytes=19,
                    created_at=now, expires_at=None if expires_in is None else now + expires_in,
                )  # fmt: skip
                add(connection, record)
        return file_id

    over, later, always = (
        keep(x, expires_in=t) for x, t in zip("abc", (-1, 60, None), strict=True)
    )
    stray = keep("d", row=False)
    temporary = ".tmp-" + "0" * 32  # of an upload that died
    (store.folder / temporary).write_bytes(LINE)
    with serving(sqlite_kept) as client:
        assert client.get(f"/v1/files/{over}").status_code == 404
        assert len(client.get("/v1/files").json()["data"]) == 2
    assert sweeper.expire() == 1
    assert sweeper.remove_strays() == 0
    assert on_disk(sqlite_kept) == sorted([temporary, later, always, stray])
    monkeypatch.setattr(file_store, "STRAY_S", -1.0)
    assert sweeper.remove_strays() == 2
    assert on_disk(sqlite_kept) == [later, always]
    database.dispose()
