"""What engines in this process say of themselves and of prompts, all in the same way."""

from __future__ import annotations

import hashlib
import os
import sys
from array import array


def prompt_digest(ids: list[int]) -> str:
    """SHA-256 over the token ids of a prompt, each as 4 bytes, little-endian."""
    words = array("I", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(words.tobytes()).hexdigest()


def plain_name(model: str) -> str:
    """The name of a model: an id as it is, of a path the last part."""
    return os.path.basename(os.path.normpath(model)) if os.path.exists(model) else model
