"""Conversations over litellm: chat, stream, tools, tools in a stream. `converse.py COUNT` writes `said.json`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from litellm import acompletion, stream_chunk_builder

ASKED: dict[str, Any] = {"model": "openai/sim", "num_retries": 4, "timeout": 600}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


async def chat(number: int) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": "Be brief."}]
    said: list[Any] = []
    for turn in ("first", "second"):
        messages.append({"role": "user", "content": f"chat {number}, {turn}"})
        response = await acompletion(messages=messages, max_tokens=100, temperature=0.7, **ASKED)
        assert response.choices[0].finish_reason == "stop"
        assert response.usage.total_tokens > 0
        messages.append(response.choices[0].message)
        said.append(response.choices[0].message.content)
    return said


async def stream(number: int) -> list[Any]:
    text, usage = "", None
    async for chunk in await acompletion(
        messages=[{"role": "user", "content": f"stream {number}"}],
        stream=True,
        stream_options={"include_usage": True},
        **ASKED,
    ):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = getattr(chunk, "usage", None) or usage
    assert usage is not None
    return [text, usage.completion_tokens]


async def tools(number: int, *, streamed: bool) -> list[Any]:
    name = f"{'streamed ' if streamed else ''}weather {number}"
    messages: list[Any] = [{"role": "user", "content": name}]
    said: list[Any] = []
    while True:
        response = await acompletion(messages=messages, tools=TOOLS, stream=streamed, **ASKED)
        if streamed:
            response = stream_chunk_builder([chunk async for chunk in response])
        message = response.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return [*said, message.content]
        assert response.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            said.append(city)
            content = f"It rains in {city}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def main(count: int) -> list[Any]:
    return await asyncio.gather(
        *(
            way
            for i in range(count)
            for way in (chat(i), stream(i), tools(i, streamed=False), tools(i, streamed=True))
        )
    )


Path("said.json").write_text(json.dumps(asyncio.run(main(int(sys.argv[1])))))
