"""Scaffolds: what drives conversations. Writing one is docs/scaffolds.md."""

from turnmill.scaffolds.base import (
    Ask,
    Ended,
    Item,
    Line,
    Loaded,
    Scaffold,
    read_lines,
    read_plain,
)

__all__ = ["Ask", "Ended", "Item", "Line", "Loaded", "Scaffold", "read_lines", "read_plain"]
