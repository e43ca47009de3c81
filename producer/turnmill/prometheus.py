"""Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Sample = bool | float | tuple[Mapping[str, str], float]
"""A value, or a value with its labels."""


def metric(name: str, kind: str, help: str, *samples: Sample) -> Iterator[str]:
    """One family."""
    yield f"# HELP turnmill_{name} {help}\n# TYPE turnmill_{name} {kind}\n"
    for sample in samples:
        labels, value = sample if isinstance(sample, tuple) else ({}, sample)
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"turnmill_{name}{f'{{{inside}}}' if inside else ''} {value + 0!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
