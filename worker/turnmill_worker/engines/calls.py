"""Ids of tool calls."""

from __future__ import annotations

import hashlib
import re
from typing import Any

_RANDOM = re.compile("call_[0-9a-f]{24}|chatcmpl-tool-[0-9a-f]{16,32}")
"""SGLang's and vLLM's."""


def name_calls(message: dict[str, Any], turn_hash: str) -> None:
    """Give tool calls ids that are the same whenever the turn is answered the same. Ids that are not
    random stay: some models' templates are made for their own."""
    for index, call in enumerate(message.get("tool_calls", ())):
        if _RANDOM.fullmatch(call["id"]):
            digest = hashlib.sha256(f"{turn_hash}{index}".encode()).hexdigest()
            call["id"] = f"call_{digest[:24]}"
