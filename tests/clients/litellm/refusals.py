"""What litellm makes of errors. `refusals.py` writes `refusals.json`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from litellm import acompletion
from openai import OpenAIError


def ask(content: str, model: str = "openai/sim", **options: Any) -> Coroutine[Any, Any, Any]:
    return acompletion(model=model, messages=[{"role": "user", "content": content}], **options)


async def refused(asking: Coroutine[Any, Any, Any]) -> list[Any] | None:
    try:
        await asking
    except OpenAIError as error:  # what all of litellm's are
        return [type(error).__name__, error.status_code]
    return None


async def main() -> dict[str, Any]:
    narrow = {"api_key": os.environ["NARROW_API_KEY"], "num_retries": 2}
    wrong = os.environ["OPENAI_API_KEY"] + "x"
    answers = await asyncio.gather(ask("one", **narrow), ask("two", **narrow))
    late = await ask("late", num_retries=2, timeout=2)
    return {
        "busy": [answer.choices[0].message.content for answer in answers],
        "late": late.choices[0].message.content,
        "long": await refused(ask("long " * 1000)),
        "model": await refused(ask("Hello", "openai/nobody")),
        "key": await refused(ask("Hello", api_key=wrong)),
    }


Path("refusals.json").write_text(json.dumps(asyncio.run(main())))
