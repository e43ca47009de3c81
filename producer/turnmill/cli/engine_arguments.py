"""Commands with an engine's own arguments after `--`."""

from __future__ import annotations

import click


class WithEngine(click.Command):
    """Whoever forgets the `--` is told of it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.NoSuchOption(
                error.option_name,
                f"{error.message} An engine's own options stand after --.",
                error.possibilities,
                error.ctx,
            ) from None
