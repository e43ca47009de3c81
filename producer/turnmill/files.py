"""What all writers of files share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turnmill.errors import CannotWrite


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses in this block is said in one line: CannotWrite, with this path."""
    try:
        yield
    except OSError as error:
        raise CannotWrite(path, error) from None
