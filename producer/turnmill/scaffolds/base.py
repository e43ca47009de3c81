"""What a scaffold is: an async function that drives one conversation, and asks for turns.

It is written as if it called a model directly. Queue, resuming, draws and failures are not its business:
it keeps no state worth saving, and run again from the start it is answered from the store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnmill.conversations import Conversation
from turnmill.reply import Reply
from turnmill.results import ConversationCap
from turnmill.turn import Message, Sampling, Tool


class Ask(Protocol):
    """Asks for one assistant message. Sampling fields given here go over the run's. A turn that fails
    raises TurnFailed, which ends the conversation as failed; a scaffold need not catch it."""

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        sampling: Sampling | None = None,
        tools: Sequence[Tool] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
    ) -> Reply: ...


@dataclass(frozen=True)
class Ended:
    """How a conversation ended, as its scaffold sees it: all its messages, and the cap that ended it."""

    messages: Sequence[Message]
    capped: ConversationCap | None = None


Scaffold = Callable[[Conversation, Ask], Awaitable[Ended]]
