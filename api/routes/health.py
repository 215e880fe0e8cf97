"""GET /health/live and /health/ready: whether to restart this process; whether jobs will run."""

import asyncio
from dataclasses import dataclass

import redis.asyncio
from fastapi import APIRouter
from redis.exceptions import RedisError
from starlette.responses import Response

from api.errors import ApiError, json_response
from api.services import Services, ServicesDep
from jobs import store

CHECK_TIMEOUT_S = 3.0

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Finding:
    code: str
    message: str


@router.get("/health/live")
async def live() -> Response:
    """The event loop turns. Says nothing of database, Redis or engines: a restart mends none."""
    return json_response({"status": "live"})


@router.get("/health/ready")
async def ready(services: ServicesDep) -> Response:
    """200 when every served model has what its jobs need to end; else 503 and what is missing.

    Jobs are accepted whenever the database is there: without Redis or a worker they wait.
    """
    reasons, (redis_reasons, warnings) = await asyncio.gather(
        _database_and_workers(services), _redis(services.redis)
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
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            workers = await services.sql.read(store.live_workers)
    except (ApiError, TimeoutError):
        return [Finding("database", "the database does not answer")]
    served = {worker.model for worker in workers}
    return [
        Finding("worker", f"no live worker for model {model}")
        for model in services.door.models
        if model not in served
    ]


async def _redis(client: "redis.asyncio.Redis") -> tuple[list[Finding], list[Finding]]:
    """Reasons and warnings."""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            await client.ping()
    except (RedisError, OSError, TimeoutError):
        return [Finding("redis", "Redis does not answer; accepted jobs wait for it")], []
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            policy = str((await client.config_get("maxmemory-policy")).get("maxmemory-policy"))
    except (RedisError, OSError, TimeoutError):
        return [], []  # hosted servers often refuse CONFIG
    if policy.startswith("allkeys-"):
        message = f"Redis may evict queued messages: maxmemory-policy is {policy}, not noeviction"
        return [], [Finding("redis_eviction", message)]
    return [], []
