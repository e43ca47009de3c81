"""Agents of pydantic-ai: with tools, with a structured output, as a stream. `converse.py COUNT` writes `said.json`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent

MODEL = "openai-chat:sim"


class Forecast(BaseModel):
    city: str
    degrees: int


plain = Agent(MODEL, instructions="Be brief.")
guide = Agent(MODEL, instructions="You know the weather.", max_concurrency=8)
forecaster = Agent(MODEL, output_type=Forecast)


@guide.tool_plain
def weather(city: str) -> str:
    """The weather in a city."""
    return f"It rains in {city}"


@guide.tool_plain
def degrees(city: str, scale: str = "C") -> dict[str, Any]:
    """How warm it is in a city."""
    return {"city": city, "degrees": len(city), "scale": scale}


async def tools(number: int) -> list[Any]:
    first = await guide.run(f"trip {number}")
    second = await guide.run(f"and back {number}", message_history=first.all_messages())
    returned = [
        part.content
        for message in second.all_messages()
        for part in message.parts
        if part.part_kind == "tool-return"
    ]
    assert second.usage.output_tokens > 0
    return [returned, first.output, second.output]


async def structured(number: int) -> list[Any]:
    forecast = (await forecaster.run(f"forecast {number}")).output
    return [forecast.city, forecast.degrees]


async def stream(number: int) -> list[Any]:
    async with plain.run_stream(f"stream {number}") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    return ["".join(pieces), result.usage.output_tokens]


async def main(count: int) -> list[Any]:
    ways = [way(i) for i in range(count) for way in (tools, structured, stream)]
    return await asyncio.gather(*ways)


Path("said.json").write_text(json.dumps(asyncio.run(main(int(sys.argv[1])))))
