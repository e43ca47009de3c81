"""How a gateway is set."""

from __future__ import annotations

from dataclasses import dataclass

from turnmill.settings import Farm


@dataclass(frozen=True)
class GatewaySettings:
    """`insecure`: nobody is asked for a key. `secret`: the one key that is taken, known to nobody else (None: those
    of the farm). `max_body`: bytes. `max_queued`: open turns of one model, from whomever (None: any number).
    `deadline`: seconds until a turn is given up (None: never). `patience`: seconds to wait for a Redis that is away or
    full. `orphan`: seconds for which a turn outside a run waits for its client to come back. `keep`: seconds for which
    the answer of such a turn is kept.
    """

    farm: Farm
    insecure: bool = False
    secret: str | None = None
    max_body: int = 32 << 20
    max_queued: int | None = None
    deadline: float | None = None
    patience: float = 30.0
    orphan: float = 30.0
    keep: float = 86_400.0
