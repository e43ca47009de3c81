"""The scripts that only workers call. All may run at full memory: they free it, or store what was paid
for."""

from __future__ import annotations

from turnmill.scripts import Script, load_script


def _load(name: str) -> Script:
    return load_script(
        name,
        "turnmill/common.lua",
        "turnmill_worker/tries.lua",
        f"turnmill_worker/{name}.lua",
        at_full_memory=True,
    )


CLAIM = _load("claim")
RENEW = _load("renew")
FINISH = _load("finish")
RECOVER = _load("recover")
ALL = (CLAIM, RENEW, FINISH, RECOVER)
