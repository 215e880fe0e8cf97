"""Lines of a batch's file, and what is wrong with them; a good one as the job it becomes.

A file is read twice, and never held. First only what makes it a batch: each line a request, all for
one endpoint and one model, every `custom_id` once. A fault there refuses the whole file, with its
line; else there is a plan of its rows. Then rows are made of it, in the order of the plan: a body
that the endpoint would refuse is a row that has failed, and the others run.
"""

import hashlib
from array import array
from itertools import pairwise
from typing import Any, BinaryIO

import msgspec

from jobs import openai, strict_json
from jobs.batch_record import BatchRecord
from jobs.batch_rows import BatchRow
from jobs.batches import MAX_ERRORS
from jobs.lifecycle import ErrorCode, error_object
from jobs.lines import Line, read_lines
from jobs.openai_fields import BodyError
from jobs.records import MAX_CUSTOM_ID_BYTES, new_job_id, storable
from jobs.settings import Settings
from worker.batch_plan import Plan

SHOWN = 64  # characters of a custom_id in a message
PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # gzip, Zstandard
_NONE = msgspec.Raw()


class _Body(msgspec.Struct):
    """The model, and what the prompt is made of."""

    model: str
    prompt: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    tools: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None

    @property
    def texts(self) -> tuple[bytes, ...]:
        """In the order a prompt has them."""
        parts = (self.tools, self.instructions, self.messages, self.prompt, self.input)
        return tuple(map(bytes, parts))

    @property
    def longest(self) -> object:
        return self.max_tokens or self.max_completion_tokens or self.max_output_tokens


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    url: str
    body: _Body
    method: str = "POST"


class _Parts(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


_decode = msgspec.json.Decoder(_Request).decode
_parts = msgspec.json.Decoder(_Parts).decode


class Reading:
    """The first time through a file: `step` as long as it returns True, then see what it found."""

    def __init__(self, file: BinaryIO, batch: BatchRecord, settings: Settings, plan: Plan) -> None:
        self.plan = plan
        self.errors: list[dict[str, Any]] = []
        self.model: str | None = None
        self.num_rows = 0
        self._file = file
        self._batch = batch
        self._settings = settings
        self._served = {entry.name for entry in settings.models}
        self._lines = read_lines(file, settings.max_job_bytes, blanks=True)
        # 8 bytes of each custom_id: what looks like a duplicate is looked at again
        self._digests = [array("Q") for _ in range(256)]
        self._doubled: set[int] = set()  # digests that are there twice: the file is read once more
        self._first_lines: dict[str, int] = {}  # of custom_ids with such a digest

    def step(self, num_lines: int) -> bool:
        """Read so many lines more, blank ones too; False at the end."""
        for _ in range(num_lines):
            line = next(self._lines, None)
            if line is None:
                return self._reads_again()
            if line.data == b"":
                continue
            if self._doubled:
                self._find_duplicate(line)
                continue
            self.num_rows += 1
            if self.num_rows == 1 and line.data is not None and line.data.startswith(PACKED):
                message = "the file is packed: it is to be sent plain, as `run-batch` does"
                self._refuse("packed_file", message, None)
                return False
            if self.num_rows > self._settings.max_batch_rows:
                limit = self._settings.max_batch_rows
                message = f"the file has more than {limit} rows, the most of one batch"
                self._refuse("too_many_rows", message, line.number)
                return False
            self._look_at(line)
        return True

    def _look_at(self, line: Line) -> None:
        if line.data is None:
            limit = self._settings.max_job_bytes
            self._refuse("line_too_long", f"a line may have at most {limit} bytes", line.number)
            return
        try:
            request = _decode(line.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            fault: tuple[str, str, str | None] | None = _fault_of(line.data)
        else:
            fault = self._fault_in(request)
            digest = _digest(request.custom_id)
            self._digests[digest & 255].append(digest)
            _add(self.plan, self._batch, self.num_rows - 1, line, request)
        if fault is not None:
            self._refuse(*fault[:2], line.number, fault[2])

    def _fault_in(self, request: _Request) -> tuple[str, str, str | None] | None:
        if fault := _custom_id_fault(request.custom_id):
            return fault
        if request.method != "POST":
            return "invalid_method", "method must be POST", "method"
        if request.url != self._batch.endpoint:
            message = f"url must be the batch's endpoint, {self._batch.endpoint}"
            return "invalid_url", message, "url"
        model = request.body.model
        if model not in self._served:
            served = ", ".join(sorted(self._served))
            message = f"model {model[:100]!r} is not served here; served: {served}"
            return "model_not_found", message, "body.model"
        self.model = self.model or model
        if model != self.model:
            message = f"all rows must name one model, earlier ones name {self.model}"
            return "mismatched_model", message, "body.model"
        return None

    def _reads_again(self) -> bool:
        """At the end of the file: whether to look which of its custom_ids are there twice."""
        if self._doubled or len(self.errors) >= MAX_ERRORS:
            return False
        if not self.num_rows:
            self._refuse("empty_file", "the file has no rows", None)
        for digests in self._digests:
            ordered = sorted(digests)
            self._doubled |= {one for one, other in pairwise(ordered) if one == other}
        self._lines = read_lines(self._file, self._settings.max_job_bytes, blanks=True)
        return bool(self._doubled)

    def _find_duplicate(self, line: Line) -> None:
        if line.data is None or len(self.errors) >= MAX_ERRORS:
            return
        try:
            custom_id = _decode(line.data).custom_id
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if _digest(custom_id) not in self._doubled:
            return
        earlier = self._first_lines.setdefault(custom_id, line.number)
        if earlier != line.number:
            shown = repr(custom_id[:SHOWN])
            message = f"custom_id {shown} is that of line {earlier} already"
            self._refuse("duplicate_custom_id", message, line.number, "custom_id")

    def _refuse(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        if len(self.errors) < MAX_ERRORS:
            error = {"code": code, "line": line, "message": message, "param": param}
            self.errors.append(error)


def _digest(custom_id: str) -> int:
    text = custom_id.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _custom_id_fault(custom_id: object) -> tuple[str, str, str | None] | None:
    problem = None
    if not isinstance(custom_id, str):
        problem = "must be a string"
    elif not storable(custom_id):
        problem = "holds U+0000 or a lone surrogate"
    elif not 1 <= len(custom_id.encode()) <= MAX_CUSTOM_ID_BYTES:
        problem = f"must have 1 to {MAX_CUSTOM_ID_BYTES} bytes"
    if problem is None:
        return None
    return "invalid_custom_id", f"custom_id {problem}", "custom_id"


def _fault_of(data: bytes) -> tuple[str, str, str | None]:
    """What is wrong with a line that is no request."""
    try:
        value = strict_json.loads(data)
    except strict_json.JSONError as error:
        return "invalid_json_line", str(error)[:300], error.path or None
    if not isinstance(value, dict):
        return "invalid_json_line", "a line must be a JSON object", None
    for name in value:
        if name not in ("custom_id", "method", "url", "body"):
            return "unknown_field", f"{name[:100]} is not a field of a line", name[:100]
    if fault := _custom_id_fault(value.get("custom_id")):
        return fault
    for name in ("method", "url"):
        if name in value and not isinstance(value[name], str):
            return f"invalid_{name}", f"{name} must be a string", name
    if "url" not in value:
        return "invalid_url", "url is required", "url"
    if not isinstance(value.get("body"), dict):
        return "invalid_body", "body must be an object", "body"
    return "invalid_body", "body.model must be a string", "body.model"


def add_to(plan: Plan, batch: BatchRecord, row_number: int, line: Line) -> None:
    """A line that was found to be a request before."""
    assert line.data is not None
    _add(plan, batch, row_number, line, _decode(line.data))


def _add(plan: Plan, batch: BatchRecord, row_number: int, line: Line, request: _Request) -> None:
    body, same = request.body, None
    if batch.dedupe:
        assert line.data is not None
        same = sameness(line.data)
    plan.add(row_number, line.start, batch.endpoint, body.longest, *body.texts, same=same)


def sameness(data: bytes) -> bytes | None:
    """Equal for lines whose bodies are, however they are written. None for one that may be answered
    in another way each time: it draws, and names no seed."""
    body = msgspec.json.decode(_parts(data).body)
    seed = body.get("seed")
    if body.get("temperature") == 0:
        body.pop("seed", None)  # nothing is drawn
    elif not isinstance(seed, int) or isinstance(seed, bool):
        return None
    return hashlib.blake2b(msgspec.json.encode(body, order="sorted"), digest_size=16).digest()


def line_at(file: BinaryIO, max_bytes: int, start: int) -> Line:
    """A line that was found there before."""
    return next(read_lines(file, max_bytes, offset=start))


def row_of(endpoint: str, line: Line, row_number: int) -> BatchRow:
    """The row that a line becomes: queued, or failed where the endpoint refuses its body."""
    assert line.data is not None
    text, max_tokens, refusal, stored = "{}", 0, None, False
    parts = _parts(line.data)
    try:
        body = strict_json.loads(line.data)["body"]
        text = bytes(parts.body).decode()
        max_tokens = _checked(endpoint, body) or 0
        stored = body.get("store") is True
    except strict_json.JSONError as error:
        param = error.path or None
        refusal = error_object(ErrorCode.INVALID_REQUEST, str(error)[:300], param=param)
    except BodyError as error:
        refusal = error_object(ErrorCode.INVALID_REQUEST, str(error), param=error.param)
    return BatchRow(
        id=new_job_id(),
        custom_id=parts.custom_id,
        row_number=row_number,
        body=text,
        max_tokens=max_tokens,
        error=refusal,
        stored=stored,
    )


def _checked(url: str, body: dict[str, Any]) -> int | None:
    """max_tokens of a body that its endpoint takes. Raises BodyError."""
    if url == openai.RESPONSES:
        for name in ("previous_response_id", "background"):
            if body.get(name):
                raise BodyError(name, f"{name} is not supported in a batch")
    return openai.parse(url, body).max_tokens
