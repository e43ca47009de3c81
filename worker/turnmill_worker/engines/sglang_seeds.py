"""SGLang and seeds. It draws by them only with --enable-deterministic-inference; and then every turn without a seed would be
drawn by the same one, so that all draws of a turn were one."""

from __future__ import annotations

import logging
from typing import Any

from turnmill.turn import Turn
from turnmill_worker.engines.base import InvalidRequest

log = logging.getLogger("turnmill.engines.sglang")

_SEED_DIGITS = 15
"""Of the hash, hexadecimal: within the 64 bits with sign that a seed has."""


class Seeds:
    """`used`: whether SGLang draws by seeds."""

    def __init__(self, *, used: bool) -> None:
        self._used, self._said = used, False

    def settle(self, turn: Turn, sampling: dict[str, Any]) -> None:
        """Give a turn that is a draw a seed of its own, made of all that it is: its sample number is in that. `sampling` is
        SGLang's. Raises InvalidRequest."""
        if not self._used:
            if turn.sampling.seed is not None and not self._said:
                self._said = True
                log.warning(
                    "a turn has a seed, and SGLang draws by seeds only with --enable-deterministic-inference"
                )
            return
        if sampling.get("min_p"):  # its scheduler would die of it
            raise InvalidRequest("min_p: not with SGLang's --enable-deterministic-inference")
        if not turn.shared:
            sampling["sampling_seed"] = int(turn.hash[:_SEED_DIGITS], 16)
