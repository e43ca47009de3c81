"""LoRA adapters. An engine that has loaded some serves a name for each, `NAME:ADAPTER`, beside its own, and to the farm each
name is a model. Names are put together here and never taken apart by their colons: a plain model's may have some, too."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from turnmill.reply import EngineIdentity
from turnmill.turn import Turn
from turnmill_worker.engines.base import Answer, Answering, Engine, InvalidRequest, Progress

NO_ADAPTERS: Final[Mapping[str, str]] = MappingProxyType({})


def by_each_name(engine: Engine) -> list[Answering]:
    """An engine by each name that turns may ask it for, its own first."""
    return [engine, *(_Adapted(engine, name) for name in engine.adapters)]


def adapter_of(turn: Turn, engine: Engine) -> str | None:
    """The adapter that a turn asks an engine for; None: the plain model. Raises InvalidRequest for one that it has not: the
    plain model would answer something else."""
    own, given = f"{engine.served_name}:", turn.model
    if not given.startswith(own):
        return None
    adapter = given.removeprefix(own)
    if adapter not in engine.adapters:
        raise InvalidRequest(f"no adapter {adapter!r} is loaded")
    return adapter


class _Adapted:
    """An engine by the name of one of its adapters."""

    def __init__(self, engine: Engine, adapter: str) -> None:
        self._engine = engine
        self.served_name = f"{engine.served_name}:{adapter}"
        self.identity = EngineIdentity(
            **engine.identity.fields | {"adapter": engine.adapters[adapter]}
        )

    async def answer(self, turn: Turn, rid: str, progress: Progress) -> Answer:
        return await self._engine.answer(turn, rid, progress)
