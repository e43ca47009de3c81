"""What a run is: written down when it begins, and compared when it goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import from_json, to_json

from turnmill.errors import ManifestChanged
from turnmill.lines import Item
from turnmill.run_settings import RunSettings
from turnmill.scaffolds.base import Scaffold


def manifest_of(
    settings: RunSettings, scaffold: Scaffold[Any], items: Sequence[Item]
) -> dict[str, Any]:
    """All that changes what a run asks."""
    return {
        "v": 1,
        "scaffold": settings.scaffold,
        "model": settings.model,
        "sampling": settings.sampling.model_dump(exclude_none=True),
        "epochs": settings.epochs,
        "seed": settings.seed,
        "reuse": settings.reuse,
        "conversations": {
            "count": len(items),
            "digest": _digest(item.digest for item in items),
        },
        **({"options": written_options(scaffold)} if scaffold.options else {}),
    }


def written_options(scaffold: Scaffold[Any]) -> dict[str, Any]:
    """The scaffold's options as they will be read again: a tuple is a list. Raises ValueError for what is not JSON."""
    options: dict[str, Any] = from_json(to_json(dict(scaffold.options), inf_nan_mode="strings"))
    return options


def check_unchanged(run: str, before: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """Raises ManifestChanged, which says what is not as it was when the run was begun."""
    changed = sorted(k for k in manifest.keys() | before.keys() if manifest.get(k) != before.get(k))
    if changed:
        raise ManifestChanged(
            f"run {run!r} was begun with other {', '.join(changed)}: "
            "choose another --run, or take the change with --extend"
        )


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
    return digest.hexdigest()
