"""Conversations over OpenAI's own client, as its documentation shows them: chat, stream, tools. `converse.py COUNT`
writes `said.json`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

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
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]


async def chat(client: AsyncOpenAI, number: int) -> list[Any]:
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}]
    said: list[Any] = []
    for turn in ("first", "second"):
        messages.append({"role": "user", "content": f"chat {number}, {turn}"})
        response = await client.chat.completions.create(
            model="sim", messages=messages, max_completion_tokens=100, stop=[], n=1
        )
        choice = response.choices[0]
        assert choice.finish_reason == "stop"
        assert response.usage
        assert response.usage.total_tokens > 0
        messages.append(choice.message)
        said.append(choice.message.content)
    return said


async def stream(client: AsyncOpenAI, number: int) -> list[Any]:
    content = [{"type": "text", "text": f"stream {number}"}]
    chunks = await client.chat.completions.create(
        model="sim",
        messages=[{"role": "user", "content": content}],
        stream=True,
        stream_options={"include_usage": True},
        temperature=0.7,
    )
    text, usage = "", None
    async for chunk in chunks:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        else:
            usage = chunk.usage
    assert usage is not None
    return [text, usage.completion_tokens]


async def tools(client: AsyncOpenAI, number: int) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": f"weather {number}"}]
    said: list[Any] = []
    while True:
        response = await client.chat.completions.create(
            model="sim", messages=messages, tools=TOOLS, parallel_tool_calls=True
        )
        message = response.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return [*said, message.content]
        assert response.choices[0].finish_reason == "tool_calls"
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            said.append(city)
            content = [{"type": "text", "text": f"It rains in {city}"}]
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": content}
            )


async def main(count: int) -> list[Any]:
    async with AsyncOpenAI() as client:
        assert "sim" in [model.id async for model in client.models.list()]
        ways = [way(client, i) for i in range(count) for way in (chat, stream, tools)]
        return await asyncio.gather(*ways)


Path("said.json").write_text(json.dumps(asyncio.run(main(int(sys.argv[1])))))
