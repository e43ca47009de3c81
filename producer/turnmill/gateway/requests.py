"""From OpenAI's requests to turns.

What does not change the answer is taken and left out; what would, and is not ours to pass on, is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError, from_json

from turnmill.errors import BadTurn
from turnmill.gateway.errors import refused
from turnmill.turn import Message, Sampling, Tool, Turn, explain, first_field

MOST_CHOICES = 128

_IGNORED = frozenset(
    {
        "cache_salt",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
_NEUTRAL: dict[str, list[Any]] = {
    "add_generation_prompt": [True],
    "bad_words": [[]],
    "best_of": [1],
    "continue_final_message": [False],
    "echo": [False],
    "functions": [[]],
    "include_reasoning": [True],
    "include_stop_str_in_output": [False],
    "length_penalty": [1],
    "logit_bias": [{}],
    "modalities": [["text"]],
    "no_stop_trim": [False],
    "parallel_tool_calls": [True],
    "separate_reasoning": [True],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "stop_token_ids": [[]],
    "suffix": [""],
    "use_beam_search": [False],
}
"""Parameters that would change the answer with any other value."""


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk with the counts of tokens."""

    include_usage: bool | None = None


class _Request(Sampling):
    """What all requests share: everything that Sampling has, by the same names."""

    model_config = ConfigDict(extra="allow", frozen=True)

    model: Annotated[str, Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(_Request):
    """A chat completion as OpenAI's API takes it. Not listed here, and taken without effect: `user`, `metadata` and what
    else does not change the answer."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class CompletionRequest(_Request):
    """A completion as OpenAI's API takes it, of one prompt of text or several. `logprobs` is a number there: so many of the
    likeliest tokens are told."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[str], Field(min_length=1)]

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise PydanticCustomError(
                "prompt", "must be a text, or a list of texts, none of them empty"
            )
        return value


@dataclass(frozen=True)
class Question:
    """What a client asks. `turns`: one for each choice, without sample numbers; the choices of one prompt are neighbours,
    and `n` in number. `chat`: whether it is a chat, or of prompts."""

    turns: list[Turn]
    n: int
    chat: bool
    stream: bool
    include_usage: bool

    @property
    def model(self) -> str:
        return self.turns[0].model


Request = TypeVar("Request", bound=_Request)


def chat_question(body: bytes) -> Question:
    """Raises ApiError, which names the parameter that is wrong."""
    request = _read(ChatRequest, _json(body))
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [_as_system(message) for message in request.messages],
        "tools": request.tools,
        "tool_choice": _tool_choice(request),
        "response_format": request.response_format,
        "chat_template_kwargs": request.chat_template_kwargs or None,
    }
    if request.response_format == {"type": "text"}:
        del fields["response_format"]
    sampling = _sampling(request)
    if request.max_completion_tokens is not None:
        most = sampling.setdefault("max_tokens", request.max_completion_tokens)
        if most != request.max_completion_tokens:
            text = f"max_tokens is {most} and max_completion_tokens {request.max_completion_tokens}"
            raise refused("max_completion_tokens", f"{text}: give one of them")
    return _question(request, [fields], sampling, chat=True)


def completion_question(body: bytes) -> Question:
    """Raises ApiError, which names the parameter that is wrong."""
    given = _json(body)
    told = given.get("logprobs")
    if type(told) is int:
        given = given | {"logprobs": True, "top_logprobs": told}
    request = _read(CompletionRequest, given)
    prompts = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    fields = [{"model": request.model, "prompt": prompt} for prompt in prompts]
    return _question(request, fields, _sampling(request), chat=False)


def _json(body: bytes) -> dict[str, Any]:
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise refused(None, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise refused(None, "the body is not a JSON object")
    return fields


def _read(kind: type[Request], fields: dict[str, Any]) -> Request:
    _check_unknown(kind, fields)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise refused(first_field(error), explain(error)) from None


def _check_unknown(kind: type[_Request], fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if value is None or name in _IGNORED or value in _NEUTRAL.get(name, []):
            continue
        if name == "parallel_tool_calls" and not fields.get("tools"):
            continue
        if name in _NEUTRAL and name not in kind.model_fields:
            only = ", ".join(repr(one) for one in _NEUTRAL[name])
            raise refused(
                name, f"{name} {value!r} is not supported: only {only}", "unsupported_parameter"
            )
        if name not in kind.model_fields:
            raise refused(
                name,
                f"unknown parameter {name!r}: it might change the answer, and would have no effect",
                "unsupported_parameter",
            )


def _as_system(message: Message) -> Message:
    return message.model_copy(update={"role": "system"}) if message.role == "developer" else message


def _tool_choice(request: ChatRequest) -> str | dict[str, Any] | None:
    choice = request.tool_choice
    if isinstance(choice, str) and choice != "required":
        return choice if request.tools else None
    if choice is None:
        return None
    names = [(tool.function or {}).get("name") for tool in request.tools or []]
    if not names:
        raise refused("tool_choice", "tool_choice asks for a tool, and there are no tools")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or name not in names:
            raise refused("tool_choice", f"tool_choice names no function of tools: {choice!r}")
    return choice


def _sampling(request: _Request) -> dict[str, Any]:
    given = {name: getattr(request, name) for name in Sampling.model_fields}
    return {name: value for name, value in given.items() if value not in (None, {})}


def _question(
    request: _Request, questions: list[dict[str, Any]], sampling: dict[str, Any], *, chat: bool
) -> Question:
    options = request.stream_options
    # Equal seeds would give equal choices: each has its own, as vLLM does it.
    seed, count = sampling.get("seed"), request.n or 1
    seeds: list[dict[str, Any]] = [{} if seed is None else {"seed": seed + i} for i in range(count)]
    if count * len(questions) > MOST_CHOICES:
        raise refused("prompt", f"{count * len(questions)} choices: at most {MOST_CHOICES}")
    try:
        turns = [
            Turn.from_body(fields | {"sampling": sampling | own})
            for fields in questions
            for own in seeds
        ]
        for turn in turns:
            turn.hash  # noqa: B018  # raises now what could not be hashed, and is remembered
    except BadTurn as error:
        raise refused(None, str(error)) from None
    return Question(
        turns,
        count,
        chat=chat,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
    )
