"""Reads a multipart upload while it comes in: one file to the disk, small fields beside it.

Never more than a megabyte of it is in memory, however large it is and however many parts it has.
"""

import asyncio
import errno
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from api.body import drain
from api.errors import BadRequest, BodyTooLarge, Overloaded, TooSlow, Unavailable
from api.pool import Pool
from api.query import read_header
from jobs.file_store import FileStore, Incoming
from jobs.files import MAX_FILENAME
from jobs.records import storable

P = ParamSpec("P")
R = TypeVar("R")

MAX_UPLOADS = 32  # at once, in one process
PAUSE_S = 30.0  # a sender silent for so long is given up
TOTAL_S = 3600.0
WRITE_BYTES = 1 << 20
MAX_PARTS = 16
MAX_FIELD_BYTES = 1024
ROOM_FOR_FIELDS = 64 << 10  # bytes of a body around its file
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(slots=True)
class Upload:
    """What came: the fields' texts, and the file, which is the caller's to keep or drop."""

    incoming: Incoming
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


class Uploads:
    """Takes uploads in. Belongs to the event loop's thread."""

    def __init__(self, store: FileStore, disk: Pool, *, max_bytes: int) -> None:
        self._store = store
        self._disk = disk
        self._max_bytes = max_bytes
        self._num_open = 0

    async def receive(self, request: Request) -> Upload:
        """Raises BadRequest, BodyTooLarge, TooSlow, Overloaded, Unavailable (no room on the disk);
        nothing is left on the disk then."""
        boundary = _boundary(request)
        declared = int(request.headers.get("content-length", "0"))
        if declared > self._max_bytes + ROOM_FOR_FIELDS:
            await drain(request.stream())
            raise self._too_large(declared)
        if self._num_open >= MAX_UPLOADS:
            raise Overloaded("too many files are being uploaded", code="overloaded")
        self._num_open += 1
        try:
            upload = Upload(await self._on_disk(self._store.incoming))
            try:
                await self._read(request, boundary, upload)
            except BaseException:
                upload.incoming.drop()
                raise
            return upload
        finally:
            self._num_open -= 1

    async def keep(self, upload: Upload, file_id: str) -> None:
        await self._on_disk(upload.incoming.keep, file_id)

    async def _read(self, request: Request, boundary: bytes, upload: Upload) -> None:
        parts = _Parts(boundary)
        async with aclosing(_patient(request)) as stream:
            async for chunk in stream:
                parts.feed(chunk)
                if upload.incoming.size + len(parts.pending) > self._max_bytes:
                    await drain(stream)
                    raise self._too_large(self._max_bytes + 1)
                if len(parts.pending) >= WRITE_BYTES:
                    await self._on_disk(upload.incoming.write, parts.take())
        parts.end()
        await self._on_disk(upload.incoming.write, parts.take())
        upload.fields, upload.filename = parts.fields, parts.filename

    async def _on_disk(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await self._disk.run(function, *args, **kwargs)
        except OSError as error:
            if error.errno in _FULL:
                raise Unavailable("the disk for files is full", code="disk_full") from None
            raise

    def _too_large(self, size: int) -> BodyTooLarge:
        error = BodyTooLarge(
            f"a file may have at most {self._max_bytes} bytes, got {size} or more",
            param="file",
            code="file_too_large",
        )
        error.headers["connection"] = "close"
        return error


class _Parts:
    """The parts of a form, from bytes cut anywhere. Raises BadRequest."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.pending = bytearray()  # of the file, not written yet
        self._name = ""
        self._in_file = False
        self._num_parts = 0
        self._text = bytearray()
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._disposition = b""
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_end": self._on_end,
            },
        )

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            message = f"the body is no multipart form: {error}"
            raise BadRequest(message[:300], code="invalid_multipart") from None

    def end(self) -> None:
        if not self._ended:
            raise BadRequest("the multipart form is cut short", code="invalid_multipart")
        if self.filename is None:
            raise BadRequest("file is required", param="file")

    def take(self) -> bytes:
        taken = bytes(self.pending)
        self.pending.clear()
        return taken

    def _on_part_begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise BadRequest(f"a form may have at most {MAX_PARTS} parts", code="invalid_multipart")
        self._disposition = b""
        self._text.clear()

    def _on_header_end(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        name.clear()
        value.clear()

    def _on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        name = options.get(b"name")
        if kind != b"form-data" or not name:
            raise BadRequest("a part of the form has no name", code="invalid_multipart")
        self._name = name.decode("utf-8", errors="replace")[:100]
        self._in_file = self._name == "file"
        if self._in_file:
            if self.filename is not None:
                raise BadRequest("file must be given once", param="file")
            if b"filename" not in options:
                raise BadRequest("file must be a file: its part has no filename", param="file")
            self.filename = _filename(options[b"filename"])
        elif self._name in self.fields:
            raise BadRequest(f"{self._name} must be given once", param=self._name)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self.pending += data[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > MAX_FIELD_BYTES:
            message = f"{self._name} must have at most {MAX_FIELD_BYTES} bytes"
            raise BadRequest(message, param=self._name)

    def _on_part_end(self) -> None:
        if not self._in_file:
            self.fields[self._name] = self._text.decode("utf-8", errors="replace")

    def _on_end(self) -> None:
        self._ended = True


def _filename(raw: bytes) -> str:
    """The last part of what the sender calls it."""
    name = raw.decode("utf-8", errors="replace").replace("\\", "/").rpartition("/")[2]
    if not 1 <= len(name) <= MAX_FILENAME or not storable(name):
        raise BadRequest(
            f"the file's name must have 1 to {MAX_FILENAME} characters, none of them NUL",
            param="file",
        )
    return name


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(read_header(request, "content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise BadRequest(
            "content-type must be multipart/form-data with a boundary", param="content-type"
        )
    encoding = read_header(request, "content-encoding")
    if encoding is not None and encoding.strip().lower() != "identity":
        raise BadRequest(
            f"content-encoding must be identity, got {encoding[:100]!r}", param="content-encoding"
        )
    boundary = options[b"boundary"]
    if len(boundary) > 70:  # RFC 2046, 5.1.1
        raise BadRequest("the boundary must have at most 70 characters", param="content-type")
    return boundary


async def _patient(request: Request) -> AsyncGenerator[bytes, None]:
    """The body's chunks, as long as they keep coming. Raises TooSlow."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + TOTAL_S
    stream = request.stream()
    async with aclosing(stream):
        while True:
            try:
                async with asyncio.timeout_at(min(loop.time() + PAUSE_S, ends_at)):
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise TooSlow(
                    f"the upload paused for {PAUSE_S:g} s, or took {TOTAL_S:g} s", code="slow"
                ) from None
            yield chunk
