"""Whether a Redis can be trusted with a farm: its version, what it may lose, its memory, its rights."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from turnmill.doctor.check import Check, size, some
from turnmill.faults import refuses
from turnmill.keys import Keys
from turnmill.scripts import call, load_script
from turnmill.settings import Farm

Info = Mapping[str, Any]
"""What Redis says of itself: redis-py's `info()`."""

RIGHTS = load_script("rights", "turnmill/rights.lua", at_full_memory=True)

REACH_SECONDS: Final = 5.0
OLDEST: Final = 7
"""Major version of Redis: scripts begin with a shebang line."""
FILLING: Final = 0.8
FULL: Final = 0.85
"""Share of `maxmemory` from which ENQUEUE refuses turns (enqueue.lua)."""
_GIVE_RIGHTS: Final = "give its user the rights of docs/operations.md, Access"
CLOCKS_APART: Final = 1.0
"""Seconds."""

_COMMANDS: Final = """
    APPEND BLPOP DBSIZE DEL EVALSHA EXISTS EXPIRE GET HDEL HEXISTS HGET HGETALL HINCRBY HKEYS HLEN HMGET HRANDFIELD
    HSET HSETNX HVALS INFO LLEN LPOP LPUSH LRANGE MGET MSET PERSIST PEXPIRE PING PSETEX RENAME RPUSH RPUSHX SADD SCARD
    SCRIPT|LOAD SET SISMEMBER SMEMBERS SMISMEMBER SPOP SRANDMEMBER SREM SSCAN STRLEN SUNIONSTORE TIME
    UNLINK XADD XRANGE XREAD XREVRANGE ZADD ZCARD ZMSCORE ZRANGE ZRANGEBYSCORE ZREM ZSCORE
"""
NEEDED: Final = tuple(_COMMANDS.split())
"""What producers and workers call on the keys of a queue, in scripts or directly."""
_KEY: Final = "KEY"
_ARGUMENTS: Final = {
    **dict.fromkeys(("DBSIZE", "INFO", "PING", "TIME"), ()),
    **dict.fromkeys(("DEL", "EXISTS", "MGET", "UNLINK"), (_KEY,)),
    **dict.fromkeys(("RENAME", "SUNIONSTORE"), (_KEY, _KEY)),
    "EVALSHA": ("0" * 40, "1", _KEY),
    "SCRIPT|LOAD": ("return 1",),
    "XREAD": ("STREAMS", _KEY, "0"),
}
"""Where they are not a key and a value."""


async def reach(redis: Redis, farm: Farm) -> Check:
    """Bad if it cannot be reached, or refuses: then nothing else can be found out."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(REACH_SECONDS):
            await redis.ping()
    except (RedisError, OSError) as error:
        text = str(error) or f"no answer in {REACH_SECONDS:g} s"
        if refuses(error):
            advice = "give the user's name and password in REDIS_URL: redis://USER:PASSWORD@HOST"
            return Check("redis", "bad", f"{farm.address} refuses: {text}", advice)
        advice = "start it, or compare host, port and TLS (rediss://) in REDIS_URL"
        return Check("redis", "bad", f"{farm.address} cannot be reached: {text}", advice)
    took = (time.monotonic() - started) * 1000
    return Check("redis", "ok", f"{farm.address} answers in {took:.1f} ms")


async def examine(redis: Redis, keys: Keys, embedded: bool) -> list[Check]:
    """All checks of a server that can be reached. Raises redis-py's errors where it goes away meanwhile."""
    checks = [await rights(redis, keys), await clock(redis)]
    try:
        info = await redis.info()
    except ResponseError as error:
        advice = "allow INFO (docs/operations.md, Access): the scripts call it, too"
        return [*checks, Check("server", "bad", f"does not say what it is: {error}", advice)]
    of_info: list[Callable[[Info], Check]] = [version, role, append_only_file, snapshots, eviction]
    return [*(check(info) for check in of_info), memory(info, embedded), *checks]


# Of what Redis says of itself


def version(info: Info) -> Check:
    if "valkey_version" in info:
        name, release = "Valkey", str(info["valkey_version"])
    else:
        name, release = "Redis", str(info.get("redis_version", "of an unknown version"))
    says = f"{name} {release}"
    if info.get("cluster_enabled"):
        advice = "use one server, with replicas if you like: the scripts compute key names"
        return Check("server", "bad", f"{says}, as a cluster", advice)
    major = release.partition(".")[0]
    if name == "Redis" and major.isdecimal() and int(major) < OLDEST:
        return Check("server", "bad", says, f"use Redis {OLDEST} or newer, or Valkey")
    return Check("server", "ok", says)


def role(info: Info) -> Check:
    if info.get("role") != "master":
        where = f"{info.get('master_host')}:{info.get('master_port')}"
        advice = f"point REDIS_URL at the primary, {where}; or wait until a failover is over"
        return Check("role", "bad", "a replica, which takes no writes", advice)
    if info.get("loading"):
        return Check("role", "warn", "it is loading its data", "wait")
    replicas = int(info.get("connected_slaves", 0))
    return Check("role", "ok", f"primary, {replicas} replicas" if replicas else "primary")


def append_only_file(info: Info) -> Check:
    if not info.get("aof_enabled"):
        advice = "config set appendonly yes, and in its configuration"
        says = "off: what was stored since the last snapshot is lost with Redis"
        return Check("aof", "warn", says, advice)
    if info.get("aof_last_write_status", "ok") != "ok":
        advice = "make room on Redis's disk: until it can write, it takes nothing more"
        return Check("aof", "bad", "on, but the last write failed", advice)
    if info.get("aof_last_bgrewrite_status", "ok") != "ok":
        advice = "give its machine memory and disk for twice its data, then: bgrewriteaof"
        return Check("aof", "warn", "on, but the last rewrite failed: the file only grows", advice)
    says = f"on, {size(info['aof_current_size'])}" if info.get("aof_current_size") else "on"
    return Check("aof", "ok", f"{says}, last write and rewrite ok")


def snapshots(info: Info) -> Check:
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        advice = (
            "mend its disk or memory; or, with an AOF, do without snapshots: config set save ''"
        )
        says = "the last one failed: Redis may refuse writes (MISCONF)"
        return Check("snapshots", "bad", says, advice)
    return Check("snapshots", "ok", "none has failed")


def eviction(info: Info) -> Check:
    policy = str(info.get("maxmemory_policy", "not known"))
    if policy == "noeviction":
        return Check("eviction", "ok", policy)
    says = f"{policy}: replies and queues are dropped when memory is short"
    return Check(
        "eviction", "bad", says, "config set maxmemory-policy noeviction, and in its configuration"
    )


def memory(info: Info, embedded: bool) -> Check:
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    machine = int(info.get("total_system_memory", 0))
    has = f"its machine has {size(machine)}" if machine else "its machine's size is not known"
    if not limit:
        says = f"{size(used)} used, no maxmemory; {has}"
        if machine and used >= FILLING * machine:
            return Check("memory", "bad", says, "move it to a larger machine, or archive runs")
        if embedded:
            return Check("memory", "ok", says)
        advice = "config set maxmemory, to at most half of its machine: or the kernel ends it, full"
        return Check("memory", "warn", says, advice)
    share = used / limit
    says = f"{size(used)} used of {size(limit)} ({share:.0%})"
    if share >= FILLING:
        advice = "raise maxmemory, or archive or forget runs"
        if share >= FULL:
            return Check("memory", "bad", f"{says}: no more turns are taken", advice)
        return Check("memory", "warn", f"{says}: from {FULL:.0%} no more turns are taken", advice)
    if machine and limit > FILLING * machine:
        advice = f"lower maxmemory: {has}, and a rewrite of the AOF needs some"
        return Check("memory", "warn", says, advice)
    return Check("memory", "ok", f"{says}; {has}")


# Of what it lets us do


async def rights(redis: Redis, keys: Keys) -> Check:
    """Whether scripts run, and their user may call what turnmill calls. Calls nothing of it."""
    model = "doctor"
    lines = [_line(command, keys.leases(model)) for command in NEEDED]
    lines += [["GET", keys.reply(model)], ["SET", keys.reply(model), ""]]
    try:
        refused = set(
            await call(
                redis, RIGHTS, [keys.prefix, keys.queue(model)], list(map(json.dumps, lines))
            )
        )
    except ResponseError as error:
        if refuses(error):
            return Check("rights", "bad", f"scripts do not run: {error}", _GIVE_RIGHTS)
        advice = f"scripts with a first line #!lua must run: use Redis {OLDEST} or newer, or Valkey"
        return Check("rights", "bad", f"scripts do not run: {error}", advice)
    lacking = [command.replace("|", " ") for i, command in enumerate(NEEDED, 1) if i in refused]
    if len(NEEDED) + 1 in refused:
        lacking.append("read replies")
    if lacking:
        says = f"this user may not: {some(lacking, most=10)} (on {keys.prefix}*)"
        return Check("rights", "bad", says, _GIVE_RIGHTS)
    if len(NEEDED) + 2 in refused:
        return Check("rights", "ok", "scripts run; this user may ask, and may not store replies")
    return Check("rights", "ok", "scripts run; this user may ask and answer")


def _line(command: str, key: str) -> list[str]:
    arguments = _ARGUMENTS.get(command, (_KEY, "1"))
    return [*command.split("|"), *(key if part == _KEY else part for part in arguments)]


async def clock(redis: Redis) -> Check:
    before = time.time()
    seconds, micros = await redis.time()
    after = time.time()
    apart = seconds + micros / 1e6 - (before + after) / 2
    if abs(apart) > CLOCKS_APART + (after - before) / 2:
        way = "ahead of" if apart > 0 else "behind"
        says = f"Redis's is {abs(apart):.1f} s {way} this machine's"
        advice = "set both by NTP: leases do not suffer, times in traces and in status do"
        return Check("clock", "warn", says, advice)
    return Check("clock", "ok", "Redis's and this machine's agree")
