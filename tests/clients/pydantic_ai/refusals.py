"""What pydantic-ai makes of errors. `refusals.py` writes `refusals.json`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.exceptions import (
    ModelAuthenticationError,
    ModelContextWindowExceededError,
    ModelHTTPError,
    ModelNotFoundError,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

KINDS = (ModelContextWindowExceededError, ModelNotFoundError, ModelAuthenticationError)


async def refused(asking: Coroutine[Any, Any, Any]) -> list[Any] | None:
    try:
        await asking
    except ModelHTTPError as error:
        (kind,) = (kind.__name__ for kind in KINDS if isinstance(error, kind))
        return [kind, error.status_code]
    return None


def agent_with(key: str) -> Agent:
    return Agent(OpenAIChatModel("sim", provider=OpenAIProvider(api_key=key)))


async def main() -> dict[str, Any]:
    agent = Agent("openai-chat:sim")
    narrow = agent_with(os.environ["NARROW_API_KEY"])
    stranger = agent_with(os.environ["OPENAI_API_KEY"] + "x")
    answers = await asyncio.gather(narrow.run("one"), narrow.run("two"))
    late = await agent.run("late", model_settings={"timeout": 2})
    return {
        "busy": [answer.output for answer in answers],
        "late": late.output,
        "long": await refused(agent.run("long " * 1000)),
        "model": await refused(Agent("openai-chat:nobody").run("Hello")),
        "key": await refused(stranger.run("Hello")),
    }


Path("refusals.json").write_text(json.dumps(asyncio.run(main())))
