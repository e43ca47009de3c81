"""A turn, and its identity.

The request hash is SHA-256 over the RFC 8785 canonical JSON of the fields that change the
answer (docs/hash.md lists what is in and what is not, and why). That canonical JSON is also the
turn's stored body, so whoever holds a body can check it against its key by hashing its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from turnmill.canonical import Canonical, canonical
from turnmill.errors import BadTurn

HASH_VERSION = 1
"""Part of the hashed JSON; it changes only if the meaning of an existing field changes."""

_MAX_EXACT_INT = 2**53 - 1

MOST_EXPLAINED = 1000
"""Each wrong value costs a kilobyte to explain, and a hostile body has millions."""

_CHAT_ONLY = ("tools", "tool_choice", "chat_template_kwargs")


class Message(BaseModel):
    """One chat message in OpenAI's shape. Keys that are not listed here are kept as they are."""

    model_config = ConfigDict(frozen=True, extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Tool(BaseModel):
    """One tool in OpenAI's shape. Unknown keys are kept: benchmarks send them."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str = "function"
    function: dict[str, Any] | None = None


class Sampling(BaseModel):
    """Sampling parameters by OpenAI's names. A field that is not set is left to the engine, which
    takes it from the model's `generation_config.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: list[str] | None = None
    seed: int | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Annotated[float, Field(allow_inf_nan=False)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    ignore_eos: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_is_a_list(cls, value: Any) -> Any:
        """OpenAI takes one string or a list; an empty list, or an empty string, stops nothing."""
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            return [stop for stop in value if stop != ""] or None
        return value


class Turn(BaseModel):
    """One request for one assistant message.

    Either `messages` are the question, or `prompt` is: a text that the model goes on with, past any chat template. The
    reply's `content` is then the text that follows it.
    `sample` tells draws apart: two turns that differ only in it are two draws from the same
    distribution, and are never merged.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    messages: list[Message] = []
    prompt: Annotated[str, Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    sampling: Sampling = Sampling()
    sample: Annotated[int, Field(ge=0, le=_MAX_EXACT_INT)] = 0

    @field_validator("tools", mode="before")
    @classmethod
    def _no_tools_is_absent(cls, value: Any) -> Any:
        return value or None

    @model_validator(mode="after")
    def _asks_one_thing(self) -> Self:
        if self.prompt is None:
            if not self.messages:
                raise _wrong("messages: Field required, unless there is a prompt")
            return self
        if self.messages:
            raise _wrong("prompt: not beside messages")
        for field in _CHAT_ONLY:
            if getattr(self, field) is not None:
                raise _wrong(f"{field}: not beside a prompt, which no chat template sees")
        return self

    @property
    def question(self) -> list[Message] | str:
        """What is asked: the messages, or the prompt."""
        return self.messages if self.prompt is None else self.prompt

    @property
    def shared(self) -> bool:
        """Whether everybody who asks this may be given the same answer: it is greedy or seeded."""
        return self.sampling.temperature == 0 or self.sampling.seed is not None

    @cached_property
    def canonical(self) -> Canonical:
        """What identifies this turn, as canonical JSON. Raises BadTurn if it has none."""
        fields = self.model_dump(exclude_none=True)
        for field in ("sampling", "messages"):
            if not fields[field]:
                del fields[field]
        return canonical({"v": HASH_VERSION, **fields})

    @property
    def body(self) -> bytes:
        """The stored form: canonical JSON (UTF-8). Raises BadTurn if it has none."""
        return self.canonical.stored

    @cached_property
    def hash(self) -> str:
        """The request hash: 64 hex digits. Raises BadTurn if the turn has no canonical JSON."""
        return hashlib.sha256(self.canonical.hashed).hexdigest()

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, which would keep the hash of what was copied."""
        copied = super().model_copy(update=update, deep=deep)
        for computed in ("hash", "canonical"):
            copied.__dict__.pop(computed, None)
        return copied

    @classmethod
    def from_body(cls, data: dict[str, Any]) -> Turn:
        """The turn of a decoded body. Raises BadTurn with the fields that are wrong."""
        fields = {k: v for k, v in data.items() if k != "v"} if "v" in data else data
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise BadTurn(explain(error)) from None


def _wrong(text: str) -> PydanticCustomError:
    """As a ValueError, which pydantic would introduce as one."""
    return PydanticCustomError("turn", "{text}", {"text": text})


def explain(error: ValidationError) -> str:
    """A pydantic error as one line: where and what, without pydantic's own decoration."""
    if error.error_count() > MOST_EXPLAINED:
        return f"{error.error_count()} values are wrong"
    parts = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        where = ".".join(str(step) for step in item["loc"])
        parts.append(f"{where}: {item['msg']}" if where else item["msg"])
    return "; ".join(parts)


def first_field(error: ValidationError) -> str | None:
    """The top-level field of which a pydantic error speaks first, if it can be said."""
    if error.error_count() > MOST_EXPLAINED:
        return None
    where = error.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]
    return str(where[0]) if where else None
