"""Conversations that need more of an engine's cache than it has, asked through a queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from turnmill import Client, Reply, Turn
from turnmill.turn import Message, Sampling

TURNS = 3
ANSWER_TOKENS = 8
TEXT = "the quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class Tokens:
    """Of all turns but the first of each conversation, which has nothing in the cache."""

    prompt: int
    cached: int

    @property
    def share(self) -> float:
        return self.cached / self.prompt


async def talk(client: Client, model: str, name: str, conversations: int, *, ahead: bool) -> Tokens:
    """Hold conversations of three turns, all begun at once. `ahead`: a conversation's next turn goes ahead of new
    ones, as a run's do. `name`: no two calls of one name, or the second finds the answers of the first."""
    found = await asyncio.gather(
        *(_converse(client, model, f"{name} {i}", ahead=ahead) for i in range(conversations))
    )
    return Tokens(sum(tokens.prompt for tokens in found), sum(tokens.cached for tokens in found))


async def _converse(client: Client, model: str, name: str, *, ahead: bool) -> Tokens:
    sampling = Sampling(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    messages: list[Message] = []
    prompt = cached = 0
    for number in range(TURNS):
        # Long enough that what was said before is most of the prompt.
        text = f"{name}: {TEXT * 6}" if number == 0 else f"go on, {number}"
        messages.append(Message(role="user", content=text))
        turn = Turn(model=model, messages=list(messages), sampling=sampling)
        reply = await client.ask(turn, going=ahead and number > 0)
        assert isinstance(reply, Reply), reply
        messages.append(reply.message)
        if number > 0:
            prompt += reply.usage.prompt_tokens
            cached += reply.usage.cached_tokens
    return Tokens(prompt, cached)
