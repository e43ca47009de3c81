"""What is stored about a turn that has ended: reply or failure, and the trace of how it came."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from turnmill.turn import Message

FinishReason = Literal["stop", "tool_calls", "length"]
Cap = Literal["output", "context"]
FailureKind = Literal[
    "invalid_request",  # the turn itself is wrong: schema, chat template, a limit of the engine
    "engine_error",  # the engine failed on this turn alone
    "poison",  # its tries ended with the death of their worker, the last one alone
    "unreadable",  # the stored body is not a turn of this hash
    "deadline",  # its waiter's time was up
    "cancelled",  # somebody asked
]


class _Record(BaseModel):
    """Stored as JSON. Unknown keys are ignored, so that an older reader takes a newer writer's
    additions; a change of meaning raises the wire version instead (see wire.py)."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Usage(_Record):
    """Token counts of one answer. `prompt_tokens` counts the original prompt, and
    `completion_tokens` all output, also where an answer was continued by a second worker."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Reply(_Record):
    """The answer to a turn.

    `capped` says which limit ended it, if one did: `output` is the turn's own max_tokens,
    `context` the engine's; then `limit` is the limit met, in tokens. `logprobs` has the shape of OpenAI's
    `choices[0].logprobs`.
    """

    hash: str
    message: Message
    finish_reason: FinishReason
    capped: Cap | None = None
    limit: int | None = None
    usage: Usage = Usage()
    logprobs: dict[str, Any] | None = None


class Failure(_Record):
    """The final word on a turn that could not be answered. `tries` counts the claims."""

    hash: str
    kind: FailureKind
    text: str
    tries: int = 1


class EngineIdentity(_Record):
    """Which engine made an answer. Answers of unequal identities are not of one experiment. `adapter`: where the weights
    of the LoRA adapter came from that the model had on."""

    engine: str
    version: str
    model: str
    revision: str | None = None
    dtype: str | None = None
    template_digest: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    adapter: str | None = None

    def __str__(self) -> str:
        """In one line: `sglang 0.5.23, Qwen/Qwen3-8B, revision 9a2f, bfloat16, template 5b3c01d2`."""
        parts = [f"{self.engine} {self.version}", self.model]
        if self.revision:
            parts.append(f"revision {self.revision}")
        if self.dtype:
            parts.append(self.dtype)
        if self.template_digest:
            parts.append(f"template {self.template_digest[:12]}")
        if self.tool_parser:
            parts.append(f"tool calls by {self.tool_parser}")
        if self.reasoning_parser:
            parts.append(f"reasoning by {self.reasoning_parser}")
        if self.adapter:
            parts.append(f"adapter {self.adapter}")
        return ", ".join(parts)

    @cached_property
    def fields(self) -> dict[str, str]:
        """Those that are known: what every trace of the engine says of it."""
        return self.model_dump(exclude_none=True)


class Times(_Record):
    """Unix times in seconds: `enqueued` by Redis's clock, all others by the worker's."""

    enqueued: float | None = None
    claimed: float | None = None
    rendered: float | None = None
    sent: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


class Try(_Record):
    """A claim of a turn that ended without an answer. `outcome`: lapse, death, drain, handback, retry.
    `at`: Unix time in seconds, by Redis's clock."""

    worker: str
    outcome: str
    at: float


class Trace(_Record):
    """How a turn was answered, or why it was not. The request hash never reads it.

    `request` is what the engine was sent: `{endpoint, prompt_tokens, prompt_digest, sampling}`; where it was not
    called, the endpoint is null.
    `earlier` are the tries before this one. `outcome`: completed, capped or failed. `resumed_at`: how many tokens
    of the answer were kept from an earlier try.
    """

    hash: str
    worker: str
    outcome: str
    earlier: list[Try] = []
    engine: EngineIdentity | None = None
    request: dict[str, Any] | None = None
    times: Times = Times()
    cached_tokens: int = 0
    resumed_at: int | None = None
