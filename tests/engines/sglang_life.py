"""An engine's life and death, in a process of its own: a program that test_sglang.py runs.

    python -m tests.engines.sglang_life MODEL ARGUMENT...

One engine it cannot start. The next, with a template of a kind that SGLang's `auto` does not know, is closed while a call waits. The third one's scheduler it kills under nine calls. It prints what it saw as one line of JSON; what it must not leave behind is on
stderr.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

import psutil
from tests.engines import tiny_model

from turnmill.errors import UsageError
from turnmill.turn import Turn
from turnmill_worker.engines.base import EngineSettings, Progress
from turnmill_worker.engines.sglang import SGLangEngine, build

ENDLESS = {"max_new_tokens": 400, "ignore_eos": True}


def main() -> None:
    settings = EngineSettings(model=sys.argv[1], arguments=tuple(sys.argv[2:]))
    seen: dict[str, Any] = {"start": refused(settings)}
    engine = build(with_another_template(settings))
    seen["parsers"] = [engine.identity.tool_parser, engine.identity.reasoning_parser]
    seen["close"] = closed(engine)
    seen["death"] = killed(build(settings))
    print(json.dumps(seen))


def refused(settings: EngineSettings) -> dict[str, Any]:
    """A start that SGLang gives up when its processes are there already."""
    wrong = (*settings.arguments, "--chat-template", "/no/such/template")
    try:
        build(replace(settings, arguments=wrong))
    except UsageError as error:
        return {
            "error": str(error),
            "children": len(multiprocessing.active_children()),
            "threads": engine_threads(),
        }
    return {}


def with_another_template(settings: EngineSettings) -> EngineSettings:
    """With tool calls like Qwen 2.5's, whose parser SGLang's `auto` does not find."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja", delete=False) as template:
        template.write(tiny_model.CHAT_TEMPLATE.replace("enable_thinking", "pondering"))
    own = ("--tool-call-parser", "auto", "--chat-template", template.name)
    return replace(settings, arguments=(*settings.arguments, *own))


def closed(engine: SGLangEngine) -> dict[str, Any]:
    children = [process for _, process in engine._processes()]
    call = threading.Thread(target=note_error, args=(errors := [], engine.generate))
    call.start()
    wait_until(lambda: engine.running() == 1)
    before = signal.getsignal(signal.SIGQUIT)
    engine.close()
    engine.close()
    call.join()
    return {
        "waiting": errors,
        "children": sum(psutil.pid_exists(child.pid) for child in children),
        "threads": engine_threads(),
        "later": note_error([], engine.generate),
        "own_signal_handler": before is not signal.SIG_DFL,
        "signal_handler_left": signal.getsignal(signal.SIGQUIT) is not signal.SIG_DFL,
    }


def killed(engine: SGLangEngine) -> dict[str, Any]:
    answers: list[str] = []
    blocked: list[str] = []
    call = threading.Thread(target=note_error, args=(blocked, engine.generate))
    call.start()

    async def turns() -> None:
        waiting = [asyncio.create_task(note(answers, engine, n)) for n in range(8)]
        while engine.running() < 9:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)
        ((_, scheduler),) = [p for p in engine._processes() if p[0].startswith("scheduler")]
        os.kill(scheduler.pid, signal.SIGKILL)
        await asyncio.gather(*waiting)

    asyncio.run(turns())
    call.join()
    # SGLang's own watchdog notices later, and sends SIGQUIT; this process must outlive that.
    engine._manager._subprocess_watchdog._thread.join()
    later: list[str] = []
    asyncio.run(note(later, engine, 9))
    result = {
        "waiting": answers + blocked,
        "later": later + note_error([], engine.generate),
        "healthy": asyncio.run(health(engine)),
        "running": engine.running(),
    }
    engine.close()
    return result


async def note(errors: list[str], engine: SGLangEngine, number: int) -> None:
    turn = Turn.from_body(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"Hello {number}"}],
            "sampling": {"ignore_eos": True, "max_tokens": 400},
        }
    )
    try:
        await engine.answer(turn, f"{number:032d}", Progress())
    except Exception as error:
        errors.append(type(error).__name__)


def note_error(errors: list[str], generate: Any) -> list[str]:
    try:
        generate("Hello", ENDLESS)
    except Exception as error:
        errors.append(type(error).__name__)
    return errors


async def health(engine: SGLangEngine) -> str:
    try:
        return str(await engine.healthy())
    except Exception as error:
        return type(error).__name__


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "sglang" in thread.name]


def wait_until(state: Any) -> None:
    deadline = time.monotonic() + 60
    while not state():
        assert time.monotonic() < deadline
        time.sleep(0.001)


if __name__ == "__main__":
    main()
