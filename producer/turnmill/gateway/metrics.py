"""What a gateway counts, for Prometheus. No run and no key is a label."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from turnmill.prometheus import metric
from turnmill.reply import Reply

BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0)
"""Seconds. An answer may take a millisecond, from the store, or hours."""


class Counts:
    """Since the gateway started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.under_way = 0
        self.hang_ups = 0
        self.turns: Counter[str] = Counter()
        self.capped: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self._took: Counter[int] = Counter()
        self._seconds = 0.0

    def ended(self, what: str, reply: Reply | None) -> None:
        """A turn that was asked for here has ended: `stored`, `made` or `failed`."""
        self.turns[what] += 1
        if reply is None:
            return
        if reply.capped:
            self.capped[reply.capped] += 1
        if what == "made":
            self.tokens["prompt"] += reply.usage.prompt_tokens
            self.tokens["cached"] += reply.usage.cached_tokens
            self.tokens["completion"] += reply.usage.completion_tokens

    def responded(self, endpoint: str, status: int, seconds: float) -> None:
        self.requests[endpoint, status] += 1
        self._took[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds

    def text(self) -> Iterator[str]:
        of_requests = [
            ({"endpoint": endpoint, "status": str(status)}, count)
            for (endpoint, status), count in sorted(self.requests.items())
        ]
        turns = [({"how": how}, self.turns[how]) for how in ("stored", "made", "failed")]
        capped = [({"by": by}, self.capped[by]) for by in ("output", "context")]
        kinds = ("prompt", "cached", "completion")
        tokens = [({"kind": kind}, self.tokens[kind]) for kind in kinds]
        if of_requests:
            help = "Requests that were responded to."
            yield from metric("gateway_requests_total", "counter", help, *of_requests)
        help = "Requests that are waited for."
        yield from metric("gateway_requests_under_way", "gauge", help, self.under_way)
        help = "Clients that hung up before they were answered."
        yield from metric("gateway_hang_ups_total", "counter", help, self.hang_ups)
        help = "Turns that ended: from the store, made, or failed."
        yield from metric("gateway_turns_total", "counter", help, *turns)
        help = "Replies that met a limit."
        yield from metric("gateway_capped_total", "counter", help, *capped)
        help = "Tokens of replies that were made; cached ones are part of the prompt's."
        yield from metric("gateway_tokens_total", "counter", help, *tokens)
        yield from self._histogram()

    def _histogram(self) -> Iterator[str]:
        name, so_far = "turnmill_gateway_request_seconds", 0
        yield f"# HELP {name} From a request to the end of its response.\n# TYPE {name} histogram\n"
        for i, bound in enumerate((*map(str, BOUNDS), "+Inf")):
            so_far += self._took[i]
            yield f'{name}_bucket{{le="{bound}"}} {so_far}\n'
        yield f"{name}_sum {self._seconds!r}\n{name}_count {so_far}\n"
