"""A turn in the hands of a worker: as claimed, and as finished."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from turnmill.reply import Try

TOKEN_LENGTH = 24
"""Characters: 8 of the worker's id, 16 of its claim number."""


class Company(StrEnum):
    """Which turns may run beside this one in its worker (QUEUE: suspects)."""

    ANY = "-"
    SUSPECTS = "~"
    ALONE = "!"


_COMPANY = {company.encode(): company for company in Company}


class Claim(NamedTuple):
    """One claimed turn. `token` fences it: only its holder may requeue or fail the turn.
    `enqueued`, `claimed`: Unix times in seconds. `stream`: somebody reads along. `priority`: 0 to 9, larger first."""

    hash: str
    token: str
    company: Company
    enqueued: float
    body: bytes
    log: bytes = b""
    claimed: float = 0.0
    stream: bool = False
    priority: int = 5

    @property
    def rid(self) -> str:
        """The request id in the engine: of fixed length, and new for each claim."""
        return self.hash + self.token

    @property
    def earlier(self) -> list[Try]:
        """The tries before this one; none if their record is damaged, which is no reason to lose the turn."""
        if not self.log:
            return []
        try:
            return [Try.model_validate(entry) for entry in from_json(b"[" + self.log + b"]")]
        except ValueError:
            return []


class Finish(NamedTuple):
    """What FINISH is told of one turn; see finish.lua for the verbs and what goes with them."""

    hash: str
    token: str
    verb: Literal["ok", "fail", "requeue", "cancelled"]
    detail: str = ""
    record: bytes | str = b""
    trace: bytes = b""

    @property
    def size(self) -> int:
        return len(self.record) + len(self.trace)


def requeue(claim: Claim, reason: str, delay: float = 0.0) -> Finish:
    """The turn goes back, to be claimed again after `delay` seconds. Only the reason `death` strikes it."""
    return Finish(claim.hash, claim.token, "requeue", str(int(delay * 1000)), reason)


def read_claims(token: str, answer: list[Any]) -> list[Claim]:
    """The turns in a CLAIM's answer, after what comes before them."""
    entries, now = answer[3:], time.time()
    return [
        Claim(
            hash=entries[i].decode(),
            token=token,
            company=_COMPANY[entries[i + 1][:1]],
            enqueued=int(entries[i + 2][1:]) / 1000,
            log=entries[i + 3],
            body=entries[i + 4],
            claimed=now,
            stream=len(entries[i + 1]) > 1,
            priority=int(entries[i + 2][:1]),
        )
        for i in range(0, len(entries), 5)
    ]
