"""A service that asks a farm: two questions at once, then a second turn in each conversation.

    REDIS_URL=redis://127.0.0.1:6379 python examples/service.py "Why is the sky blue?" "What is a tide?"

It may be killed at any moment: started again with the same questions, it finds the turns that were
answered meanwhile in the store and asks only for the others.
"""

from __future__ import annotations

import asyncio
import os
import sys

from turnmill import Client, Failure, Message, Reply, Sampling, Turn, TurnmillError

PATIENCE = 600.0
"""Seconds for all answers."""


async def converse(client: Client, model: str, questions: list[str]) -> int:
    """Two turns for each question. Returns how many turns failed."""
    # Greedy, so that whoever asks the same is given the same answer.
    sampling = Sampling(temperature=0, max_tokens=64)
    first = [
        Turn(model=model, messages=[Message(role="user", content=question)], sampling=sampling)
        for question in questions
    ]
    hashes = await client.submit_many(first)
    turns = dict(zip(hashes, first, strict=True))
    print(f"asked for {len(turns)} turns")

    second = []
    failed = 0
    async for hash, ending in client.as_ended(list(turns), timeout=PATIENCE):
        failed += show(ending)
        if isinstance(ending, Reply) and ending.capped != "context":
            further = Message(role="user", content="Say it in one sentence.")
            messages = [*turns[hash].messages, ending.message, further]
            second.append(Turn(model=model, messages=messages, sampling=sampling))

    for ending in (await client.wait_many(await client.submit_many(second), PATIENCE)).values():
        failed += show(ending)
        trace = await client.trace(ending.hash)
        if trace and trace.engine:
            print(f"    by {trace.engine.engine} {trace.engine.version}, worker {trace.worker}")
    return failed


def show(ending: Reply | Failure) -> bool:
    """Print how a turn ended; returns whether it failed."""
    if isinstance(ending, Failure):
        print(f"{ending.hash[:12]} failed: {ending.kind}: {ending.text}")
        return True
    limit = f" (capped: {ending.capped})" if ending.capped else ""
    print(f"{ending.hash[:12]} {ending.message.content}{limit}")
    return False


async def main(questions: list[str]) -> int:
    async with Client(run="service-example") as client:
        status = await client.status()
        served = sorted({worker.model for worker in status.workers})
        model = os.environ.get("MODEL") or (served[0] if served else "")
        if not model:
            print("no worker lives: set MODEL to the name that one will serve", file=sys.stderr)
            return 2
        return 1 if await converse(client, model, questions) else 0


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(sys.argv[1:] or ["Why is the sky blue?", "What is a tide?"])))
    except TurnmillError as error:
        print(f"service: {error}", file=sys.stderr)
        sys.exit(2)
