"""The command line. The only place of this package that prints: a command a file."""

from __future__ import annotations

import logging

import click
from rich.logging import RichHandler

from turnmill.cli.archive import archive, restore
from turnmill.cli.cancel import cancel
from turnmill.cli.common import err
from turnmill.cli.doctor import doctor
from turnmill.cli.drill import drill
from turnmill.cli.exec import exec_
from turnmill.cli.forget import forget
from turnmill.cli.keys import keys
from turnmill.cli.replies import replies
from turnmill.cli.run import run
from turnmill.cli.serve import serve
from turnmill.cli.status import status
from turnmill.cli.suite import suite
from turnmill.cli.why import why
from turnmill.cli.worker import worker


@click.group()
@click.version_option(package_name="turnmill")
@click.option("--verbose", "-v", is_flag=True, help="Say more.")
def cli(verbose: bool) -> None:
    """A durable queue of conversation turns in front of inference engines."""
    handler: logging.Handler = logging.StreamHandler()  # a log file wants whole lines
    if err.is_terminal:
        handler = RichHandler(console=err, show_path=False, show_time=False, markup=False)
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(message)s", handlers=[handler]
    )


for command in (
    run,
    suite,
    replies,
    status,
    cancel,
    forget,
    archive,
    restore,
    drill,
    doctor,
    why,
    worker,
    serve,
    exec_,
    keys,
):
    cli.add_command(command)


def main() -> None:
    cli(prog_name="turnmill")
