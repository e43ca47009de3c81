"""Input files of comma-separated values: a header, and a row of text a line (or several, where a cell has line ends)."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from turnmill.errors import BadInput
from turnmill.lines import ItemT, Loaded, Parsed, first_double, load, opened

_LONGEST_CELL: Final = 1 << 30
"""Characters. The csv module's own limit is for the whole process, and too small for long prompts."""


def read_csv(
    path: str | Path,
    columns: Collection[str],
    parse: Callable[[dict[str, Any]], ItemT],
    skip_bad: bool = False,
) -> Loaded[ItemT]:
    """The items of a CSV file, as `lines.read_lines` has it: its rows are objects of text by column. Raises BadInput, too,
    if the header has not all of `columns`, or where quoting is broken, also with `skip_bad`: rows may be anywhere from there."""
    name = str(path)
    with opened(name, path) as file:
        data = file.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise BadInput(name, line, "not UTF-8") from None
    csv.field_size_limit(_LONGEST_CELL)
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(rows, [])
    except csv.Error as error:
        raise BadInput(name, 1, f"not CSV: {error}") from None
    if missing := [column for column in columns if column not in header]:
        raise BadInput(name, 1, f"the header has no {', '.join(missing)}")
    if (double := first_double(header)) is not None:
        raise BadInput(name, 1, f"the column {double!r} is there twice")
    return load(name, _rows(name, rows, header), parse, skip_bad)


def _rows(name: str, rows: Any, header: list[str]) -> Iterator[Parsed]:
    while True:
        number = rows.line_num + 1
        try:
            cells = next(rows, None)
        except csv.Error as error:
            raise BadInput(name, number, f"not CSV: {error}") from None
        if cells is None:
            return
        if cells:
            yield number, partial(_by_column, cells, header)


def _by_column(cells: list[str], header: list[str]) -> dict[str, Any]:
    if len(cells) != len(header):
        raise ValueError(f"has {len(cells)} cells, and the header {len(header)}")
    return dict(zip(header, cells, strict=True))
