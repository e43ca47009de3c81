"""The scripts that only workers call. All but KEEP may run at full memory: they free it, or store what was
paid for."""

from __future__ import annotations

from turnmill.scripts import Script, load_script


def _load(name: str, *shared: str, at_full_memory: bool = True) -> Script:
    return load_script(
        name,
        "turnmill/common.lua",
        *shared,
        "turnmill_worker/tries.lua",
        f"turnmill_worker/{name}.lua",
        at_full_memory=at_full_memory,
    )


CLAIM = _load("claim")
RENEW = _load("renew", "turnmill/holds.lua")
FINISH = _load("finish")
RECOVER = _load("recover")
KEEP = _load("keep", at_full_memory=False)
REGISTER = load_script(
    "register", "turnmill/common.lua", "turnmill_worker/register.lua", at_full_memory=True
)
ALL = (CLAIM, RENEW, FINISH, RECOVER, KEEP, REGISTER)
