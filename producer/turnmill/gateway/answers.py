"""From a question to its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from turnmill.gateway.access import Asker
from turnmill.gateway.lanes import Lanes
from turnmill.gateway.placed import Desk, Placed
from turnmill.gateway.requests import Question
from turnmill.gateway.responses import Shape
from turnmill.reading import Delta
from turnmill.reply import Reply
from turnmill.tasks import end_tasks


class Answers:
    """Asks for the turns of questions. Raises ApiError, and what the library raises."""

    def __init__(self, desk: Desk, lanes: Lanes) -> None:
        self._desk, self._lanes = desk, lanes

    @asynccontextmanager
    async def _placed(self, question: Question, asker: Asker) -> AsyncIterator[list[Placed]]:
        async with self._lanes.client(asker.lane) as client:
            turns = enumerate(question.turns)
            places = [Placed(self._desk, client, asker, turn, index) for index, turn in turns]
            try:
                yield places
            finally:
                for place in places:
                    place.leave()

    async def whole(self, question: Question, asker: Asker) -> tuple[dict[str, Any], list[Placed]]:
        """The response, once all turns have ended, and the turns."""
        async with self._placed(question, asker) as places:
            tasks = [asyncio.ensure_future(place.reply()) for place in places]
            try:
                replies = list(await asyncio.gather(*tasks))
            finally:
                await end_tasks(tasks)
            for index, place in enumerate(places):
                while not await place.deliver():
                    replies[index] = await place.reply()
                place.count(replies[index])
            return Shape(question, places[0].turn.hash).whole(replies), places

    async def chunks(self, question: Question, asker: Asker) -> AsyncGenerator[dict[str, Any]]:
        """The response in chunks. What is wrong before the first answer begins is raised before the first chunk."""
        async with self._placed(question, asker) as places:
            heard: asyncio.Queue[tuple[int, Delta | Reply | Exception]] = asyncio.Queue()
            tasks = [
                asyncio.ensure_future(_listen(index, place, heard))
                for index, place in enumerate(places)
            ]
            try:
                shape: Shape | None = None
                writers: dict[int, _Writer] = {}
                replies: dict[int, Reply] = {}
                while len(replies) < len(places):
                    index, item = await heard.get()
                    if isinstance(item, Exception):
                        raise item
                    shape = shape or Shape(question, places[0].turn.hash)
                    writer = writers.get(index)
                    if writer is None:
                        whole = bool(question.turns[index].sampling.logprobs)
                        writer = writers[index] = _Writer(shape, index, whole)
                        if opening := shape.opening(index):
                            yield opening
                    if isinstance(item, Reply):
                        replies[index] = item
                    for chunk in writer.chunks(item):
                        yield chunk
                if shape and question.include_usage:
                    yield shape.usage([replies[index] for index in sorted(replies)])
            finally:
                await end_tasks(tasks)


async def _listen(
    index: int, place: Placed, heard: asyncio.Queue[tuple[int, Delta | Reply | Exception]]
) -> None:
    try:
        async for item in place.growing():
            heard.put_nowait((index, item))
    except Exception as error:
        heard.put_nowait((index, error))


class _Writer:
    """One choice as chunks. `whole`: its text is told at the end, with the log probabilities that belong to it."""

    def __init__(self, shape: Shape, index: int, whole: bool) -> None:
        self._shape, self._index, self._whole = shape, index, whole
        self._sent = 0

    def chunks(self, item: Delta | Reply) -> Iterator[dict[str, Any]]:
        shape, index = self._shape, self._index
        if isinstance(item, Delta):
            if not self._whole:
                self._sent += len(item.content)
                yield shape.piece(index, item.content)
            return
        content = item.message.content
        rest = content[self._sent :] if isinstance(content, str) else ""
        if rest or (self._whole and item.logprobs):
            yield shape.piece(index, rest, item if self._whole else None)
        if extras := shape.extras(index, item):
            yield extras
        yield shape.closing(index, item)
