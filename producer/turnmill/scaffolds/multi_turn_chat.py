"""Scripted chat: the user's messages are given, the model answers each in turn."""

from __future__ import annotations

from turnmill.conversations import Conversation, read_conversations
from turnmill.scaffolds.base import Ask, Ended, Scaffold
from turnmill.turn import Message


async def drive(conversation: Conversation, ask: Ask) -> Ended:
    """Ask each user message with all that was said before. A reply that met its own `max_tokens` is part of
    the conversation like any other; a full context ends it."""
    messages: list[Message] = []
    if conversation.system is not None:
        messages.append(Message(role="system", content=conversation.system))
    for user in conversation.turns:
        messages.append(user)
        reply = await ask(messages, sampling=conversation.sampling, tools=conversation.tools)
        messages.append(reply.message)
        if reply.capped == "context":
            return Ended(messages, "context")
    return Ended(messages)


multi_turn_chat = Scaffold(drive, read_conversations)
