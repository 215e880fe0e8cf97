"""GET /health/live and /health/ready: whether to restart this process; whether jobs will run."""

import asyncio
from dataclasses import dataclass

import redis.asyncio
from redis.exceptions import RedisError, ResponseError
from sqlalchemy import Connection
from starlette.responses import Response

from api.errors import ApiError, json_response
from api.routing import Router
from api.services import Services
from jobs import store
from jobs.records import WorkerRecord

REDIS_TIMEOUT_S = 3.0
WRITE_TROUBLE_S = 10.0  # a full disk still answers: what it said of a write counts for so long
PROBE_S = 10  # of the key that shows whether Redis takes what is written

router = Router()


@dataclass(frozen=True, slots=True)
class Finding:
    code: str
    message: str


@router.get("/health/live")
async def live() -> Response:
    """The event loop turns. Says nothing of database, Redis or engines: a restart mends none."""
    return json_response({"status": "live"})


@router.get("/health/ready")
async def ready(services: Services) -> Response:
    """200 when every served model has what its jobs need to end; else 503 and what is missing.

    Jobs are accepted whenever the database is there: without Redis or a worker they wait.
    """
    reasons, (redis_reasons, warnings) = await asyncio.gather(
        _database_and_workers(services), _redis(services.redis, services.settings.key_prefix)
    )
    reasons += redis_reasons
    return json_response(
        {
            "status": "not ready" if reasons else "ready",
            "reasons": [{"code": each.code, "message": each.message} for each in reasons],
            "warnings": [{"code": each.code, "message": each.message} for each in warnings],
        },
        status=503 if reasons else 200,
    )


async def _database_and_workers(services: Services) -> list[Finding]:
    try:
        workers = await services.sql.check(_workers)
    except store.WrongSchema as error:
        return [Finding("schema", str(error))]
    except ApiError as error:
        return [Finding("database", error.message)]
    findings = []
    if (trouble := services.sql.write_trouble(WRITE_TROUBLE_S)) is not None:
        findings.append(Finding("database", trouble))
    served = {worker.model for worker in workers}
    able = {worker.model for worker in workers if not worker.stats.get("engine_failing")}
    for model in services.door.models:
        if model not in served:
            findings.append(Finding("worker", f"no live worker for model {model}"))
        elif model not in able:
            message = f"the engine of model {model} does not start: see its worker's log"
            findings.append(Finding("engine", message))
    return findings


def _workers(connection: Connection, now: float) -> list[WorkerRecord]:
    store.need_schema(connection)
    return store.live_workers(connection, now)


async def _redis(
    client: "redis.asyncio.Redis", key_prefix: str
) -> tuple[list[Finding], list[Finding]]:
    """Reasons and warnings."""
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            await client.set(f"{key_prefix}probe", "", ex=PROBE_S)
    except ResponseError as error:  # out of memory, its disk full, a replica
        return [Finding("redis", f"Redis refuses to write: {error}; accepted jobs wait")], []
    except (RedisError, OSError, TimeoutError):
        return [Finding("redis", "Redis does not answer; accepted jobs wait for it")], []
    try:
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            policy = str((await client.config_get("maxmemory-policy")).get("maxmemory-policy"))
    except (RedisError, OSError, TimeoutError):
        return [], []  # hosted servers often refuse CONFIG
    if policy.startswith("allkeys-"):
        message = f"Redis may evict queued messages: maxmemory-policy is {policy}, not noeviction"
        return [], [Finding("redis_eviction", message)]
    return [], []
