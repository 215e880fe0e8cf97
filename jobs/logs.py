"""A process's log: lines of text, or an object of JSON on each line.

What a line is about (a request's id, its tenant) is known where the call came in, and said once for
all lines that the call leads to: `about`. A job's id is read from the line, which names it first.

No line of ours says a prompt, an output or a secret. Should one come in from elsewhere, in a
library's line or a fault's trace, keys, signing secrets and the servers' passwords are masked: a
second line of defence, since no pattern can know a prompt.
"""

import json
import logging
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote, urlsplit

from jobs.settings import Settings

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MASK = "…"
# API keys; secrets of webhooks; what a client sent as its key
_SECRETS = (
    re.compile(r"(?<=\btm_)[0-9a-z]{12}_[0-9A-Za-z_-]{20,}"),
    re.compile(r"(?<=\bwhsec_)[0-9A-Za-z+/=_-]{8,}"),
    re.compile(r"(?<=\bBearer )[^\s'\",)]+", re.IGNORECASE),
)
_JOB = re.compile(r"^job ([0-9A-Za-z_-]{1,64})\b|\b(job_[0-9a-z]{20,})\b")
_about: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("about", default=())


@contextmanager
def about(**values: str) -> Iterator[None]:
    """All that is logged inside, in this task and those it begins, is about these, too."""
    token = _about.set((*_about.get(), *values.items()))
    try:
        yield
    finally:
        _about.reset(token)


def set_up(settings: Settings, *, text_format: str = TEXT_FORMAT) -> None:
    """Give the process its one handler, on standard error, unless it has one."""
    set_up_as(
        settings.log_format,
        settings.log_level,
        text_format=text_format,
        passwords=passwords_of(settings),
    )


def set_up_as(
    form: str, level: str, *, text_format: str = TEXT_FORMAT, passwords: Collection[str] = ()
) -> None:
    """The same for a process that knows no settings."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(form, text_format=text_format, passwords=passwords))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def formatter(
    form: str, *, text_format: str = TEXT_FORMAT, passwords: Collection[str] = ()
) -> logging.Formatter:
    return JSONFormatter(passwords) if form == "json" else TextFormatter(text_format, passwords)


def passwords_of(settings: Settings) -> frozenset[str]:
    """Those of the database and of Redis, as they are and as their URLs spell them."""
    found = {urlsplit(url).password for url in (settings.database_url, settings.redis_url)}
    found.add(settings.api_key)
    return frozenset(form for each in found if each for form in (each, unquote(each)))


class TextFormatter(logging.Formatter):
    def __init__(self, text_format: str, passwords: Collection[str]) -> None:
        super().__init__(text_format)
        self._mask = _Mask(passwords)

    def format(self, record: logging.LogRecord) -> str:
        return self._mask(super().format(record))


class JSONFormatter(logging.Formatter):
    """{"at", "level", "logger", "process", "message"}, and where known "request_id", "tenant",
    "job_id", and of a fault "error" and "trace"."""

    def __init__(self, passwords: Collection[str]) -> None:
        super().__init__()
        self._mask = _Mask(passwords)

    def format(self, record: logging.LogRecord) -> str:
        message = self._mask(record.getMessage())
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": message,
            **dict(_about.get()),
        }
        if (tenant := getattr(record, "tenant", None)) is not None:  # where no call came in
            line["tenant"] = tenant
        if found := _JOB.search(message):
            line["job_id"] = found[1] or found[2]
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["trace"] = self._mask(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


class _Mask:
    def __init__(self, passwords: Collection[str]) -> None:
        # longest first: one may be the beginning of another
        known = sorted(map(re.escape, passwords), key=len, reverse=True)
        self._patterns = (*_SECRETS, re.compile("|".join(known))) if known else _SECRETS

    def __call__(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(MASK, text)
        return text
