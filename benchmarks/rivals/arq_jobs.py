"""The same no-op work for a stock arq worker. Runs in arq's own environment:

arq_jobs.py fill SOCKET COUNT       put COUNT jobs of about 1 kB into the queue
arq_jobs.py work SOCKET MAX_JOBS    a stock worker, until it is ended
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import uvloop
from arq.connections import RedisSettings, create_pool
from arq.worker import Worker, func

TEXT = "mill" * 228


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def body(number: int) -> dict[str, Any]:
    """About 1 kB as JSON: a turn as it is stored."""
    return {
        "messages": [
            {"content": TEXT, "role": "system"},
            {"content": f"Turn {number}.", "role": "user"},
        ],
        "model": "sim",
        "sampling": {"temperature": 0.0},
        "v": 1,
    }


async def answer(context: dict[str, Any], turn: dict[str, Any]) -> dict[str, Any]:
    """A reply and a trace of the sizes that are stored for a turn."""
    text = turn["messages"][-1]["content"]
    return {
        "reply": {
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 195, "completion_tokens": 2, "cached_tokens": 0},
        },
        "trace": {
            "worker": "a-worker",
            "outcome": "completed",
            "engine": {"engine": "sim", "version": "0.1.0", "model": "sim", "dtype": "words"},
            "request": {
                "endpoint": "sim.answer",
                "prompt_tokens": 195,
                "prompt_digest": "0" * 64,
                "sampling": {"temperature": 0.0, "max_tokens": 7997},
            },
            "times": {name: 1.8e9 for name in ("claimed", "rendered", "sent", "last_token")},
        },
    }


async def fill(settings: RedisSettings, count: int) -> None:
    pool = await create_pool(settings, job_serializer=dumps, job_deserializer=json.loads)
    for start in range(0, count, 100):
        numbers = range(start, min(count, start + 100))
        await asyncio.gather(*(pool.enqueue_job("answer", body(n)) for n in numbers))
    await pool.aclose()


def work(settings: RedisSettings, max_jobs: int) -> None:
    Worker(
        functions=[func(answer, name="answer")],  # type: ignore[arg-type]
        redis_settings=settings,
        max_jobs=max_jobs,
        poll_delay=0.01,
        log_results=False,
        job_serializer=dumps,
        job_deserializer=json.loads,
    ).run()


def main() -> None:
    command, path, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    logging.basicConfig(level=logging.WARNING)
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    settings = RedisSettings(unix_socket_path=path)
    if command == "fill":
        asyncio.run(fill(settings, number))
    else:
        asyncio.set_event_loop(asyncio.new_event_loop())
        work(settings, number)


if __name__ == "__main__":
    main()
