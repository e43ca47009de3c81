"""The loop of the Berkeley multi-turn categories: in each turn, steps until the model calls nothing any more."""

from __future__ import annotations

import asyncio

from bfcl_eval.constants.default_prompts import MAXIMUM_STEP_LIMIT

from turnmill.scaffolds.base import Ask, Ended, Scaffold
from turnmill.scaffolds.bfcl.entries import Entry, read
from turnmill.scaffolds.bfcl.world import NoCall, World, judge, world
from turnmill.scaffolds.told import told_again
from turnmill.turn import Message


async def drive(entry: Entry, ask: Ask) -> Ended:
    """One entry. A turn ends when the model calls nothing; an entry with a turn of more than 20 steps has failed; so has
    one that fills the context."""
    with world(entry) as simulated:
        messages: list[Message] = []
        calls: list[list[list[str]]] = []
        for said, tools in entry.turns():
            messages += said
            steps: list[list[str]] = []
            calls.append(steps)
            for _ in range(MAXIMUM_STEP_LIMIT + 1):
                reply = await ask(messages, tools=tools)
                messages.append(told_again(reply.message))
                if reply.capped == "context":
                    return Ended(messages, "context", "context_overflow", 0.0)
                step = _step(simulated, reply.message)
                if not step:
                    break
                steps.append(step)
                await _execute(simulated, step, messages, ask)
            else:
                return Ended(messages, "turns", "max_steps", 0.0)
    verdict = await asyncio.to_thread(judge, entry, calls)
    if verdict["valid"]:
        return Ended(messages, None, "correct", 1.0)
    why = {key: verdict[key] for key in verdict if key in ("error_type", "error_message")}
    return Ended(messages, None, "wrong", 0.0, why)


def _step(simulated: World, message: Message) -> list[str]:
    """The calls of a message; none, if one of them is no call, as in the benchmark's own loop."""
    try:
        return [simulated.call_of(call.get("function") or {}) for call in message.tool_calls or ()]
    except NoCall:
        return []


async def _execute(simulated: World, step: list[str], messages: list[Message], ask: Ask) -> None:
    async def execute() -> list[str]:
        return simulated.execute(step)

    results = await ask.effect("calls", execute, rebuild=True)
    ids = [call.get("id") for call in messages[-1].tool_calls or ()]
    messages += [
        Message(role="tool", content=result, tool_call_id=id)
        for result, id in zip(results, ids, strict=True)
    ]


bfcl_multi_turn = Scaffold(drive, read)
