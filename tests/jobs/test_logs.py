"""Log lines: what they are about, and what is masked in them."""

import asyncio
import io
import json
import logging

import pytest

from jobs import logs
from jobs.settings import Settings

PASSWORD = "hunter%402"
SETTINGS = Settings(
    database_url=f"postgresql://me:{PASSWORD}@db/x", redis_url="redis://:open-sesame@r/0"
)


@pytest.fixture(params=["text", "json"])
def log(request):
    """A logger of its own, and what it has written."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.formatter(request.param, passwords=logs.passwords_of(SETTINGS)))
    logger = logging.Logger("mill")
    logger.addHandler(handler)
    return logger, lambda: written.getvalue()


@pytest.fixture
def json_log():
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logs.formatter("json"))
    logger = logging.Logger("mill")
    logger.addHandler(handler)
    return logger, lambda: [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_line_is_an_object_that_says_what_it_is_about(json_log):
    logger, lines = json_log
    with logs.about(request_id="req_1"), logs.about(tenant="acme"):
        logger.warning("job %s attempt %d fenced out", "by-another-name", 2)
        logger.info("taken in: first=%s", "job_01m8pqpz1092tb8ykaxhtf1kwv")
    logger.info("job %s ended", "a", extra={"tenant": "globex"})
    logger.info("the job was deleted\nand so on")
    first, second, third, fourth = lines()
    assert set(first) == {
        "at", "level", "logger", "process", "message", "request_id", "tenant", "job_id",
    }  # fmt: skip
    assert first["message"] == "job by-another-name attempt 2 fenced out"
    assert (first["level"], first["logger"]) == ("warning", "mill")
    assert (first["request_id"], first["tenant"], first["job_id"]) == (
        "req_1", "acme", "by-another-name",
    )  # fmt: skip
    assert second["job_id"] == "job_01m8pqpz1092tb8ykaxhtf1kwv"
    assert (third["tenant"], "request_id" in third) == ("globex", False)
    assert "job_id" not in fourth


def test_calls_side_by_side_are_told_apart(json_log):
    logger, lines = json_log

    async def call(name):
        with logs.about(request_id=name):
            await asyncio.sleep(0)
            logger.info("%s", name)

    async def both():
        await asyncio.gather(call("a"), call("b"))

    asyncio.run(both())
    assert sorted((line["message"], line["request_id"]) for line in lines()) == [
        ("a", "a"), ("b", "b"),
    ]  # fmt: skip


def test_secrets_are_masked_in_lines_and_traces(log):
    logger, written = log
    key, secret = "tm_0123456789ab_" + "k" * 43, "whsec_c2VjcmV0c2VjcmV0c2VjcmV0"
    logger.info("called with %s, Authorization: Bearer abc.def", key)
    try:
        raise ValueError(f"{SETTINGS.database_url} {SETTINGS.redis_url} {key} {secret}")
    except ValueError:
        logger.exception("failed: %s", secret)
    text = written()
    assert "Traceback" in text
    for canary in (key[3:], secret[6:], "abc.def", PASSWORD, "hunter@2", "open-sesame"):
        assert canary not in text
    assert text.count(logs.MASK) >= 7
