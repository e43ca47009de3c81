"""What a worker says of itself to whoever watches it. All of it is read from other threads than it is written in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from turnmill.reply import Reply
from turnmill.store import WorkerInfo
from turnmill_worker.claim import Finish

OUTCOMES: Final = ("completed", "capped", "failed", "requeued", "cancelled")
_BY_VERB: Final = {"fail": "failed", "requeue": "requeued", "cancelled": "cancelled"}


class Counters:
    """What a worker has done since it started, in plain integers: counting must cost nothing.

    Each is written by one thread: `renewed` and `registered` by the lease keeper's, the others by the worker's loop.

    `claimed`, `finished`: turns. `made`: tokens, also of tries that ended without an answer. `lost`: running turns of which Redis said that somebody else has them by now, or
    that they have ended. `renewed`: leases, each as often as it was. `registered`: whether Redis took what this
    worker last said of itself.
    """

    def __init__(self) -> None:
        self.claimed = 0
        self.finished = dict.fromkeys(OUTCOMES, 0)
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0
        self.made = 0
        self.renewed = self.lost = 0
        self.registered = False

    @classmethod
    def together(cls, parts: Sequence[Self]) -> Self:
        """The counters of several, added up; of one, these themselves. `registered`: all are."""
        if len(parts) == 1:
            return parts[0]
        whole = cls()
        for name in vars(whole):
            if name == "finished":
                whole.finished = {one: sum(p.finished[one] for p in parts) for one in OUTCOMES}
            else:
                setattr(whole, name, sum(getattr(part, name) for part in parts))
        whole.registered = all(part.registered for part in parts)
        return whole

    def count(self, finish: Finish, reply: Reply | None) -> None:
        """A turn has ended here, with a reply or without."""
        if finish.verb != "ok":
            self.finished[_BY_VERB[finish.verb]] += 1
            return
        self.finished["capped" if reply and reply.capped else "completed"] += 1
        if reply is None:
            return
        self.prompt_tokens += reply.usage.prompt_tokens
        self.completion_tokens += reply.usage.completion_tokens
        self.cached_tokens += reply.usage.cached_tokens


@dataclass(frozen=True)
class Vitals:
    """How a worker is now. `infos`: what it says of itself, for each name that it serves. `in_engine`: requests. `unstored`: ended turns that Redis has not been told of.
    `silent`: seconds since the engine was seen alive. `ending`: why it is about to exit with an error."""

    infos: Sequence[WorkerInfo]
    in_engine: int
    unstored: int
    silent: float
    ending: str = ""
