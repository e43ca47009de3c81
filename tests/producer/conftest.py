"""The command line, for the tests of this folder too."""

from tests.acceptance.conftest import make_cli, on_farm

__all__ = ["make_cli", "on_farm"]
