"""What a run is, beside its conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from turnmill.asking import Again
from turnmill.budget import FailureBudget
from turnmill.turn import Sampling


@dataclass(frozen=True)
class RunSettings:
    """What a run is, beside its conversations.

    `sampling` is under each conversation's own. `epochs`: how often each conversation is held, with draws of
    its own each time. `seed`: makes every draw repeatable. `reuse`: draws are of this `run` alone, or shared by
    `all` runs that say so. `again`: stored endings that this attempt asks again. `concurrency`: conversations at
    once (None: from the slots of the workers that live). `extend`: take another manifest. `allow_mixed`: take another engine. `keep`:
    seconds until the run is forgotten, once it has ended (None: never).
    """

    name: str
    model: str
    scaffold: str = "multi_turn_chat"
    sampling: Sampling = field(default_factory=Sampling)
    epochs: int = 1
    seed: int | None = None
    reuse: Literal["run", "all"] = "run"
    concurrency: int | None = None
    max_failures: FailureBudget = field(default_factory=lambda: FailureBudget.parse("5%"))
    again: frozenset[Again] = frozenset()
    extend: bool = False
    allow_mixed: bool = False
    keep: float | None = None
