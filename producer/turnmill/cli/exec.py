"""turnmill exec."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import click

from turnmill.children import parent_death_signal
from turnmill.cli.common import a_farm, err, execute, redis_options, say_how_to_join, with_options
from turnmill.cli.serve import need_gateway
from turnmill.errors import UsageError
from turnmill.settings import check_run

LOOPBACK = "127.0.0.1"
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""As shells exit when there is no such command."""
REPORT_SECONDS = 10.0
DRAIN_SECONDS = 1.0


@click.command("exec")
@click.argument("run")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
@click.option("--url", help="A gateway that serves already. [one of its own]")
@click.option(
    "--api-key", envvar="OPENAI_API_KEY", help="For --url, if it asks for one. [OPENAI_API_KEY]"
)
@click.option("--json", "as_json", is_flag=True, help="Report as a line of JSON.")
@with_options(redis_options)
def exec_(
    run: str,
    command: tuple[str, ...],
    url: str | None,
    api_key: str | None,
    as_json: bool,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> None:
    """Run COMMAND, a client of OpenAI's API, as an attempt at RUN: killed and run again, it is answered from the
    store what it was answered before. `turnmill exec RUN -- COMMAND ...`; exits with the command's code."""

    async def work() -> int:
        check_run(run)
        async with _gateway(url, api_key, redis_url, namespace, data) as (base, key):
            attempt = f"{base}/runs/{run}/attempts/{secrets.token_hex(6)}"
            code = await _run(command, f"{attempt}/v1", key)
            await _report(attempt, key, as_json)
        return code

    execute(lambda: work)


@asynccontextmanager
async def _gateway(
    url: str | None,
    api_key: str | None,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> AsyncIterator[tuple[str, str]]:
    """Address and key of the gateway that serves, or of one of our own, which takes no other key."""
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {url!r}: must begin with http:// or https://")
        yield url.rstrip("/").removesuffix("/v1"), api_key or "none"
        return
    need_gateway()
    from turnmill.gateway.server import bind, serving, url_of
    from turnmill.gateway.settings import GatewaySettings

    secret = secrets.token_urlsafe(32)
    bound = bind(LOOPBACK, 0, insecure=False)
    async with a_farm(redis_url, namespace, data) as farm:
        # What runs alone waits for Redis as a run does: for as long as its client does.
        settings = GatewaySettings(farm, secret=secret, patience=600.0)
        async with serving(settings, bound, drain=DRAIN_SECONDS):
            if not redis_url:
                say_how_to_join(farm)
            yield url_of(bound), secret


async def _run(command: tuple[str, ...], base: str, key: str) -> int:
    """Run the command to its end. Returns its exit code, as a shell does."""
    ends_with_us = parent_death_signal(signal.SIGTERM) if sys.platform == "linux" else None
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env=_environment(base, key), preexec_fn=ends_with_us
        )
    except OSError as error:
        err.print(f"turnmill: {command[0]}: {error.strerror}", soft_wrap=True)
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    loop = asyncio.get_running_loop()

    def forward(number: int) -> None:
        with suppress(ProcessLookupError):
            process.send_signal(number)

    def interrupt() -> None:
        # A terminal sends Ctrl-C to both of us; twice would be the order to drop everything.
        if not _in_foreground():
            forward(signal.SIGINT)

    for number in FORWARDED:
        loop.add_signal_handler(number, forward, number)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        forward(signal.SIGTERM)
        await process.wait()
        raise
    return code if code >= 0 else 128 - code


def _environment(base: str, key: str) -> dict[str, str]:
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": base,
        "OPENAI_API_BASE": base,
        "OPENAI_API_KEY": key,
    }
    for name in ("NO_PROXY", "no_proxy"):  # a proxy does not know our loopback
        environment[name] = ",".join(filter(None, (os.environ.get(name), LOOPBACK)))
    return environment


def _in_foreground() -> bool:
    """Whether we are what a terminal runs in the foreground, with all of our group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


async def _report(attempt: str, key: str, as_json: bool) -> None:
    # Whatever --url leads to: the command has run, and its code counts.
    try:
        counts = await asyncio.to_thread(_counts, attempt, key)
        said = json.dumps(counts) if as_json else _said(counts)
    except (OSError, HTTPException, ValueError, TypeError, KeyError) as error:
        problem = str(error) if isinstance(error, OSError | HTTPException) else "no gateway answers"
        said = f"turnmill: the attempt cannot be reported: {' '.join(problem.split())}"
    with suppress(OSError):  # nobody reads it
        err.print(said, soft_wrap=True)


def _counts(attempt: str, key: str) -> dict[str, Any]:
    request = urllib.request.Request(attempt, headers={"Authorization": f"Bearer {key}"})
    proxies = urllib.request.ProxyHandler({} if f"//{LOOPBACK}:" in attempt else None)
    opener = urllib.request.build_opener(proxies)
    with opener.open(request, timeout=REPORT_SECONDS) as response:
        counts: dict[str, Any] = json.load(response)
    return counts


def _said(counts: dict[str, Any]) -> str:
    capped = counts["capped_output"] + counts["capped_context"]
    parts = [
        f"{counts['stored']} turns from the store",
        f"{counts['made']} made",
        f"{capped} capped ({counts['capped_output']} by output, {counts['capped_context']} by context)",
        f"{counts['failed']} failed",
    ]
    return f"run {counts['run']}, attempt {counts['attempt']}: {', '.join(parts)}"
