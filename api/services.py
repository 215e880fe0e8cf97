"""What the routes stand on, wired once when the process starts."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import redis.asyncio
from fastapi import Depends, Request
from redis.exceptions import RedisError

from api.body import BodyReader
from api.door import Door
from api.hints import Hints
from api.keyring import Keyring
from api.pool import Pool
from api.present import Presenter
from api.sql import Sql
from api.waiters import Waiters
from jobs.keys import Principal
from jobs.settings import Settings

HINTS_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Belongs to the event loop's thread, except where a part says otherwise."""

    settings: Settings
    door: Door
    waiters: Waiters
    hints: Hints
    bodies: BodyReader
    sql: Sql
    presenter: Presenter
    keyring: Keyring
    cpu: Pool  # parsing and tokenizing
    redis: redis.asyncio.Redis  # for health only

    async def close(self) -> None:
        self.hints.stop(HINTS_GRACE_S)
        self.cpu.close()
        self.sql.close()
        with suppress(RedisError, OSError):
            await self.redis.aclose()


async def get_services(request: Request) -> Services:  # a plain function costs a thread each call
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def get_tenant(request: Request) -> str:
    """Whose call this is, as `api.guard` has found out."""
    return principal_of(request).tenant


def principal_of(request: Request) -> Principal:
    principal = request.scope["principal"]
    assert isinstance(principal, Principal)
    return principal


TenantDep = Annotated[str, Depends(get_tenant)]  # every statement of a route names it
ServicesDep = Annotated[Services, Depends(get_services)]
