"""Agents of the `stirrup` framework, whose turns go through the queue.

Needs Python 3.12 and `pip install stirrup lxml_html_clean`. The scaffold `stirrup` runs an agent on each line of a
file; with an agent of one's own, in a scaffold of one's own, `QueueClient` is its model, and `journalled` sees to its
tools.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from turnmill.errors import UsageError
from turnmill.reply import Reply
from turnmill.scaffolds.base import Ask, Ended, Line, Loaded, Scaffold, plain_line, read_lines
from turnmill.scaffolds.told import told_again
from turnmill.turn import Message, Sampling, Tool

try:
    from stirrup import Agent
    from stirrup.clients.utils import to_openai_messages, to_openai_tools
    from stirrup.core.exceptions import ContextOverflowError, OutputTokenLimitError
    from stirrup.core.models import (
        AssistantMessage,
        ReasoningBlock,
        TextBlock,
        TokenUsage,
        ToolCall,
        ToolMessage,
        ToolUseCountMetadata,
    )
    from stirrup.tools.calculator import CALCULATOR_TOOL
    from stirrup.utils.logging import AgentLoggerBase
except ImportError as error:
    raise ImportError(
        f"{error.name or error}: needs Python 3.12, and pip install stirrup lxml_html_clean"
    ) from error


class QueueClient:
    """stirrup's LLMClient over an `ask`. `model`: a name for its logs; what is asked is the run's model.
    `context_window_tokens`: at which share of them the agent summarizes is its own setting. `max_tokens`: of one
    answer (None: the run's)."""

    def __init__(
        self,
        ask: Ask,
        *,
        context_window_tokens: int,
        model: str = "turnmill",
        max_tokens: int | None = None,
    ) -> None:
        self._ask, self._max_tokens = ask, max_tokens
        self.model_slug, self.context_window_tokens = model, context_window_tokens
        self.messages: list[Message] = []
        """What was asked last."""

    async def generate(self, messages: list[Any], tools: dict[str, Any]) -> Any:
        """stirrup's AssistantMessage. Raises ContextOverflowError when there is no room in the engine's context,
        OutputTokenLimitError when the answer met its `max_tokens`, TurnFailed when the turn failed."""
        started = time.perf_counter()
        self.messages = _messages(messages)
        reply = await self._ask(
            self.messages,
            tools=[Tool.model_validate(tool) for tool in to_openai_tools(tools)],
            tool_choice="auto" if tools else None,
            sampling=Sampling(max_tokens=self._max_tokens),
        )
        if reply.capped == "context":
            raise ContextOverflowError(
                f"{reply.usage.prompt_tokens} tokens of prompt, and a context of {reply.limit}"
            )
        if reply.capped == "output":
            raise OutputTokenLimitError(
                model_slug=self.model_slug,
                max_tokens=reply.limit or reply.usage.completion_tokens,
                provider_reason="length",
            )
        usage = reply.usage
        return AssistantMessage(
            blocks=_blocks(reply),
            token_usage=TokenUsage(
                input=usage.prompt_tokens,
                answer=usage.completion_tokens - usage.reasoning_tokens,
                reasoning=usage.reasoning_tokens,
            ),
            request_start_time=started,
            request_end_time=time.perf_counter(),
        )


def _messages(said: list[Any]) -> list[Message]:
    return [told_again(Message.model_validate(message)) for message in to_openai_messages(said)]


def _blocks(reply: Reply) -> list[Any]:
    message = reply.message
    blocks: list[Any] = []
    if message.reasoning_content:
        blocks.append(ReasoningBlock(content=message.reasoning_content))
    if isinstance(message.content, str) and message.content:
        blocks.append(TextBlock(text=message.content))
    # Ids of their own: effects are found again by them, and stirrup makes up one for a call without.
    again = told_again(message).tool_calls
    for call, told in zip(message.tool_calls or (), again or (), strict=True):
        function = call["function"]
        blocks.append(
            ToolCall.from_provider(
                provider_id=told["id"],
                name=function["name"],
                arguments=function.get("arguments") or "",
            )
        )
    return blocks


def journalled(session: Any, ask: Ask) -> Any:
    """The session of an agent (what `async with agent.session()` gives), its tools run as effects: each call is run once, and
    what it said is told again to a later attempt. Calls are run again where a later one needs the files
    that they left."""
    run_tool = session.run_tool

    async def run_once(call: Any, run_metadata: dict[str, list[Any]]) -> Any:
        async def run() -> dict[str, Any]:
            noted: dict[str, list[Any]] = {}
            said = await run_tool(call, noted)
            uses = [_count(one) for one in noted.get(call.name, ())]
            # Times of this attempt would differ in the next.
            return {"said": said.model_dump(mode="json", exclude=_TIMES), "uses": uses}

        done = await ask.effect(call.tool_call_id or "", run, rebuild=True)
        uses = [ToolUseCountMetadata(num_uses=count) for count in done["uses"]]
        run_metadata.setdefault(call.name, []).extend(uses)
        return ToolMessage.model_validate(done["said"])

    session.run_tool = run_once
    return session


_TIMES = {"tool_start_time", "tool_end_time"}


def _count(metadata: Any) -> int:
    return int(getattr(metadata, "num_uses", 1))


class Silent(AgentLoggerBase):  # type: ignore[misc]
    """A logger of agents that says nothing: many of them run at once, and the run tells how it goes."""

    def __init__(self) -> None:
        self.name, self.model, self.max_turns, self.depth = "", None, None, 0
        self.finish_params = self.run_metadata = self.output_dir = None

    def __enter__(self) -> Silent:
        return self

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    __exit__ = on_step = assistant_message = user_message = task_message = tool_result = _nothing
    context_summarization_start = context_summarization_complete = _nothing
    debug = info = warning = error = _nothing


def calculating(client: QueueClient, item: Line) -> Any:
    """An agent with stirrup's calculator, and nothing that touches the machine."""
    return Agent(client, "turnmill", tools=[CALCULATOR_TOOL], logger=Silent())


def stirrup(
    *,
    agent: str = f"{__name__}:calculating",
    score: str = "",
    context_window_tokens: int = 32_768,
    max_tokens: int | None = None,
) -> Scaffold[Line]:
    """Agents on tasks: lines with an `id` and a `task`.

    `agent`: MODULE:FUNCTION that makes a stirrup Agent of (client, item). `score`: MODULE:FUNCTION that gives a number for
    (item, finish_params, messages). Raises UsageError if they cannot be imported.
    """
    make, judge = _function(agent), _function(score) if score else None

    async def drive(item: Line, ask: Ask) -> Ended:
        client = QueueClient(
            ask, context_window_tokens=context_window_tokens, max_tokens=max_tokens
        )
        async with make(client, item).session(cache_on_interrupt=False) as session:
            try:
                finish, history, _ = await journalled(session, ask).run(item.fields["task"])
            except ContextOverflowError as overflow:
                return Ended(client.messages, "context", "context_overflow", details=_why(overflow))
            except OutputTokenLimitError as cut:
                return Ended(client.messages, "output", "output_limit", details=_why(cut))
        # Each part but the last ends where the agent summarized it away.
        told = [message for part in history for message in _messages(part)]
        if finish is None:
            return Ended(told, "turns", "max_turns", None if judge is None else 0.0)
        points = None if judge is None else float(judge(item, finish, told))
        return Ended(told, None, "finished", points, {"finish": finish.model_dump(mode="json")})

    options = {"agent": agent, "score": score, "context_window_tokens": context_window_tokens}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    return Scaffold(drive, _read, options)


def _why(error: Exception) -> Mapping[str, Any]:
    return {"error": str(error)}


def _read(source: str, skip_bad: bool) -> Loaded[Line]:
    return read_lines(source, _task, skip_bad)


def _task(fields: dict[str, Any]) -> Line:
    if not isinstance(fields.get("task"), str):
        raise ValueError("task: must be a string")
    return plain_line(fields)


def _function(name: str) -> Callable[..., Any]:
    module, there, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{name!r}: {error}") from None
    if not there or not callable(found):
        raise UsageError(f"{name!r}: must be MODULE:FUNCTION")
    return partial(found)
