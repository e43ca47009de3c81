"""An engine's life and death, in a process of its own: a program that test_vllm.py runs.

    python -m tests.engines.vllm_life MODEL ARGUMENT...

One engine it closes while a call waits. Of the next it uses vLLM's own interface from a second loop, and then kills the
engine core under eight calls. It prints what it saw as one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from typing import Any

import psutil
from tests.engines.asking import new_rid, turn, until

from turnmill_worker.engines.base import EngineSettings, Progress
from turnmill_worker.engines.vllm import VLLMEngine, build

STALLED = 5.0
"""Seconds for an answer of one token."""


def main() -> None:
    settings = EngineSettings(model=sys.argv[1], arguments=tuple(sys.argv[2:]))
    seen: dict[str, Any] = {"close": asyncio.run(closed(build(settings)))}
    engine = build(settings)
    seen["stalls"] = stalls(engine)
    seen["death"] = asyncio.run(killed(engine))
    engine.close()
    print(json.dumps(seen))


async def closed(engine: VLLMEngine) -> dict[str, Any]:
    children = psutil.Process().children(recursive=True)
    waiting = asyncio.create_task(error_of(engine, 0))
    await until(lambda: engine.running() == 1)
    await asyncio.to_thread(engine.close)
    engine.close()
    return {
        "waiting": [await waiting],
        "later": [await error_of(engine, 1)],
        "children": sum(map(lives, children)),
        "threads": [t.name for t in threading.enumerate() if t.name == "vllm-engine-loop"],
    }


def stalls(engine: VLLMEngine) -> bool:
    """Whether vLLM's own interface leaves a loop waiting that is not its own: what it says wakes nobody there."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1)

    async def one() -> None:
        async for _ in engine._client.generate("Hello", params, "from another loop"):
            pass

    call = threading.Thread(target=lambda: asyncio.run(one()), daemon=True)
    call.start()
    call.join(STALLED)
    return call.is_alive()


async def killed(engine: VLLMEngine) -> dict[str, Any]:
    children = psutil.Process().children(recursive=True)
    before = engine.running()
    waiting = [asyncio.create_task(error_of(engine, n)) for n in range(8)]
    await until(lambda: engine.running() == before + 8)
    core = next(filter(lives, children))
    os.kill(core.pid, signal.SIGKILL)
    errors = [await task for task in waiting]
    await until(lambda: not any(map(lives, children)))
    try:
        health = str(await engine.healthy())
    except Exception as error:
        health = type(error).__name__
    return {
        "waiting": errors,
        "later": [await error_of(engine, 9)],
        "healthy": health,
        "running": engine.running(),
        "children": sum(map(lives, children)),
    }


async def error_of(engine: VLLMEngine, number: int) -> str:
    asked = turn(f"Hello {number}", ignore_eos=True, max_tokens=400)
    try:
        await engine.answer(asked, new_rid(), Progress())
    except Exception as error:
        return type(error).__name__
    return "none"


def lives(process: psutil.Process) -> bool:
    if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
        return False
    return "resource_tracker" not in " ".join(process.cmdline())


if __name__ == "__main__":
    main()
