"""turnmill serve."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import click

from turnmill.cli.common import a_farm, err, execute, redis_options, say_how_to_join, with_options
from turnmill.errors import UsageError
from turnmill.settings import parse_duration

DEFAULT_PORT = 8000


def duration(_: click.Context, __: click.Parameter, text: str | None) -> float | None:
    """A click callback."""
    try:
        return None if text is None else parse_duration(text)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None


def need_gateway() -> None:
    """Raises UsageError where the extra is not installed."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{error.name} is not installed: pip install 'turnmill[gateway]'"
        ) from None


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--insecure", is_flag=True, help="Ask nobody for a key; on loopback only.")
@click.option(
    "--max-body",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Of a request, MiB.",
)
@click.option(
    "--max-queued", type=click.IntRange(min=1), help="Open turns of a model at once. [any number]"
)
@click.option("--deadline", callback=duration, help="After so long a turn is given up. [never]")
@click.option(
    "--patience",
    callback=duration,
    default="30s",
    show_default=True,
    help="How long to wait for a Redis that is away or full.",
)
@click.option(
    "--keep",
    callback=duration,
    default="24h",
    show_default=True,
    help="How long to keep answers that no run holds.",
)
@click.option(
    "--drain",
    callback=duration,
    default="5s",
    show_default=True,
    help="How long requests may go on after SIGTERM.",
)
@with_options(redis_options)
def serve(
    host: str,
    port: int,
    insecure: bool,
    max_body: int,
    max_queued: int | None,
    deadline: float | None,
    patience: float,
    keep: float,
    drain: float,
    redis_url: str | None,
    namespace: str | None,
    data: Path | None,
) -> None:
    """Serve OpenAI's API: any client of it gets the queue, its caps, and resuming."""

    async def work() -> int:
        need_gateway()
        from turnmill.gateway.server import bind, serving, url_of
        from turnmill.gateway.settings import GatewaySettings

        bound = bind(host, port, insecure=insecure)
        async with a_farm(redis_url, namespace, data) as farm:
            settings = GatewaySettings(
                farm,
                insecure=insecure,
                max_body=max_body << 20,
                max_queued=max_queued,
                deadline=deadline,
                patience=patience,
                keep=keep,
            )
            async with serving(settings, bound, drain=drain) as task:
                err.print(f"serving on {url_of(bound)}/v1", soft_wrap=True)
                if not redis_url:
                    say_how_to_join(farm)
                with suppress(asyncio.CancelledError):  # SIGTERM is how a server ends
                    await asyncio.shield(task)
        return 0

    execute(lambda: work)
