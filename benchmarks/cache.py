"""`cache`: how much of their prompts running conversations find in the engine's cache, because their next turn goes
ahead of their run's new ones; and how much they would, if it did not.

The engine is the real SGLang on the CPU. Its cache holds a few conversations, and many more are under way: so what
counts is only the order in which the queue hands out their turns.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import redis
from tests.engines import sglang_env
from tests.engines.talking import TURNS, Tokens, talk

from benchmarks.conditions import conditions
from benchmarks.environments import sglang_python
from benchmarks.farm import ROOT, farm_environment, process, server, server_version, wait_for
from benchmarks.measure import Spread, interleaved
from benchmarks.report import Result, Row
from turnmill.client import Client
from turnmill.keys import Keys
from turnmill.settings import Farm

CONVERSATIONS, SLOTS, CACHE_TOKENS = 100, 4, 4096
START_SECONDS = 300.0

Say = Callable[[str], None]


def run(rounds: int, say: Say) -> Result:
    python = sglang_python(say)
    say("starting SGLang")
    with server() as on, tempfile.TemporaryDirectory(prefix="turnmill-bench-") as folder:
        model = Path(folder) / "model"
        command = [str(python), str(ROOT / "tests/engines/tiny_model.py"), str(model)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        farm = Farm(on.url)
        environment = {**sglang_env.environment(), **farm_environment(farm)}
        with (
            process(_worker_command(python, model), environment) as worker,
            redis.Redis.from_url(on.url) as client,
        ):
            wait_for(lambda: bool(client.exists(Keys().workers)), worker, seconds=START_SECONDS)
            number = iter(range(2 * rounds + 2))

            def once(*, ahead: bool) -> Tokens:
                return asyncio.run(_talk(farm, f"{next(number)}", ahead=ahead))

            once(ahead=True)  # warms up
            measured = interleaved(
                {"ahead": lambda: once(ahead=True), "in turn": lambda: once(ahead=False)},
                rounds,
                say,
            )
    ahead, in_turn = (
        Spread.of([tokens.share for tokens in measured[name]]) for name in ("ahead", "in turn")
    )
    prompt = measured["ahead"][0].prompt // (CONVERSATIONS * (TURNS - 1))
    return Result(
        "cache",
        "Cached tokens of running conversations on SGLang",
        [
            Row("cached_ahead", "cached share of prompts, next turns go ahead", ahead),
            Row("cached_in_turn", "cached share of prompts, in order of asking", in_turn),
        ],
        {
            "engine": f"SGLang 0.5.23 on the CPU, a Qwen2 of 150,000 random weights; its cache holds {CACHE_TOKENS:,} "
            f"tokens; {SLOTS} turns at once",
            "conversations": f"{CONVERSATIONS} of {TURNS} turns, all begun at once; second and third turns are counted, "
            f"whose prompts are {prompt} tokens long on average",
        },
        conditions(server_version()),
    )


def _worker_command(python: Path, model: Path) -> list[str]:
    line = [str(python), "-m", "turnmill_worker", "--engine", "sglang", "--model", str(model)]
    line += ["--served-name", "tiny", "--slots", str(SLOTS), "--"]
    return [*line, *sglang_env.ARGUMENTS, "--max-total-tokens", str(CACHE_TOKENS)]


async def _talk(farm: Farm, name: str, *, ahead: bool) -> Tokens:
    async with Client(farm.url, namespace=farm.namespace, run="bench") as client:
        return await talk(client, "tiny", name, CONVERSATIONS, ahead=ahead)
