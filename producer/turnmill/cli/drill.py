"""turnmill drill."""

from __future__ import annotations

import os
import sys

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def drill(arguments: tuple[str, ...]) -> None:
    """Kill workers at random and count what was lost. `turnmill drill --help` lists its options."""
    os.execv(sys.executable, [sys.executable, "-m", "turnmill_worker.drill_cli", *arguments])
