"""`gateway`: what the front door costs. `turnmill serve` with Redis and a worker around SGLang, against SGLang's own
HTTP server: two engines with the same model and arguments on the CPU, asked in turn by the same client, with the same
prompts. All processes of a contender share the machine with the client; the other contender sleeps meanwhile.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil
from tests.engines import sglang_env

from benchmarks.conditions import conditions
from benchmarks.environments import sglang_python
from benchmarks.farm import ROOT, farm_environment, process, server, server_version, wait_for
from benchmarks.http_driver import Asked, ask
from benchmarks.measure import Spread, interleaved
from benchmarks.report import COUNT, RATIO, Result, Row
from turnmill.settings import Farm

GOAL = 0.85
MODEL = "tiny"
TEXT = "the quick brown fox jumps over the lazy dog. "
START_SECONDS = 300.0
IDLE_SECONDS = 5.0
MILLISECONDS = "{:.1f}"

Say = Callable[[str], None]
Ask = Callable[[], Asked]


@dataclass(frozen=True)
class Load:
    """Requests of so many tokens each, so many at a time."""

    requests: int
    tokens: int
    at_once: int
    stream: bool

    def bodies(self, name: str) -> list[dict[str, Any]]:
        """No two prompts are equal or begin alike, so neither a cache of prompts nor a stored answer helps."""
        return [self._body(f"{i}, {name}: {TEXT * 3}") for i in range(self.requests)]

    def _body(self, text: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            # Random weights end an answer anywhere; all are to be of one length.
            "max_tokens": self.tokens,
            "ignore_eos": True,
            # The model has one, and with it nothing could be kept, so nothing be streamed.
            "repetition_penalty": 1.0,
        }
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


LOADS = {
    "whole": Load(requests=96, tokens=96, at_once=48, stream=False),
    "streamed": Load(requests=96, tokens=96, at_once=48, stream=True),
    "alone": Load(requests=20, tokens=16, at_once=1, stream=True),
    "of eight": Load(requests=48, tokens=48, at_once=8, stream=True),
}


def run(rounds: int, say: Say) -> Result:
    python = sglang_python(say)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="turnmill-bench-"))
        model = Path(folder) / "model"
        command = [str(python), str(ROOT / "tests/engines/tiny_model.py"), str(model)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        say("starting SGLang twice")
        # One after the other: each counts the memory that is free.
        urls = {
            "SGLang": stack.enter_context(_sglang(python, model)),
            "turnmill": stack.enter_context(_turnmill(python, model)),
        }
        for name, load in LOADS.items():
            say(f"warming up: {name}")
            for url in urls.values():
                ask(url, load.bodies("warm-up"), load.at_once)
        idle = _idle()
        measured = {}
        for name, load in LOADS.items():
            rivals = {rival: _asking(url, name, load) for rival, url in urls.items()}
            measured[name] = interleaved(rivals, rounds, partial(_say_of, say, name))
    return Result(
        "gateway",
        "The gateway with a worker, and SGLang's own HTTP server",
        [row for name in ("whole", "streamed") for row in _rates(name, measured[name])]
        + [row for name in ("alone", "of eight") for row in _firsts(name, measured[name])],
        {
            "engine": "SGLang 0.5.23 on the CPU, one for each, a Qwen2 of 150,000 random weights, float32, 32 requests "
            "at once; prompts of about 80 tokens, all different; greedy",
            "turnmill": "`turnmill serve`, a server, and a worker with the sglang engine; requests outside a run",
            "SGLang": "`sglang.launch_server` with the same arguments",
            "client": "one process, aiohttp, as many connections as requests at once",
            **{f"load: {name}": _about(load) for name, load in LOADS.items()},
            "while neither is asked": f"all processes of both use {idle:.3f} of a core",
        },
        conditions(server_version()),
    )


def _rates(name: str, asked: dict[str, list[Asked]]) -> Iterator[Row]:
    load = LOADS[name]
    for one in (one for rounds in asked.values() for one in rounds):
        assert one.tokens == load.requests * load.tokens, one.tokens
    ours, theirs = (Spread.of([a.rate for a in asked[rival]]) for rival in ("turnmill", "SGLang"))
    yield Row(
        f"{name}_ratio", f"tokens/s, {name}: turnmill / SGLang", ours.over(theirs), RATIO, GOAL
    )
    yield Row(f"{name}_tokens_per_s", f"tokens/s, {name}: turnmill", ours, COUNT)
    yield Row(f"{name}_sglang_tokens_per_s", f"tokens/s, {name}: SGLang", theirs, COUNT)


def _firsts(name: str, asked: dict[str, list[Asked]]) -> Iterator[Row]:
    ours, theirs = (
        Spread.of([1e3 * statistics.median(a.first) for a in asked[rival]])
        for rival in ("turnmill", "SGLang")
    )
    key = f"first_{name.replace(' ', '_')}"
    text = f"first text of a stream {name}, p50"
    yield Row(f"{key}_ratio", f"{text}: turnmill / SGLang", ours.over(theirs), RATIO)
    yield Row(f"{key}_ms", f"{text}: turnmill, ms", ours, MILLISECONDS)
    yield Row(f"{key}_sglang_ms", f"{text}: SGLang, ms", theirs, MILLISECONDS)


def _about(load: Load) -> str:
    form = "streamed" if load.stream else "whole"
    return f"{load.requests} requests of {load.tokens} tokens, {load.at_once} at once, {form}"


def _asking(url: str, name: str, load: Load) -> Ask:
    """Each call asks the prompts of the next round."""
    numbers = count()
    return lambda: ask(url, load.bodies(f"{name} {next(numbers)}"), load.at_once)


def _say_of(say: Say, name: str, text: str) -> None:
    say(f"{name}, {text}")


# The contenders


@contextmanager
def _sglang(python: Path, model: Path) -> Iterator[str]:
    port = _free_port()
    line = [str(python), "-m", "sglang.launch_server", "--model-path", str(model)]
    line += ["--served-model-name", MODEL, *sglang_env.ARGUMENTS, "--skip-server-warmup"]
    line += ["--host", "127.0.0.1", "--port", str(port)]
    with process(line, sglang_env.environment()) as child:
        wait_for(lambda: _answers(port, "/health"), child, seconds=START_SECONDS, pause=0.2)
        yield _chat(port)


@contextmanager
def _turnmill(python: Path, model: Path) -> Iterator[str]:
    port = _free_port()
    work = [str(python), "-m", "turnmill_worker", "--engine", "sglang", "--model", str(model)]
    work += ["--served-name", MODEL, "--", *sglang_env.ARGUMENTS]
    serve = [sys.executable, "-m", "turnmill", "serve", "--insecure", "--port", str(port)]
    with server() as on:
        farm = farm_environment(Farm(on.url))
        with (
            process(work, {**sglang_env.environment(), **farm}) as worker,
            process(serve, farm) as gateway,
        ):
            wait_for(
                lambda: _answers(port, f"/v1/models/{MODEL}"),
                worker,
                gateway,
                seconds=START_SECONDS,
                pause=0.2,
            )
            yield _chat(port)


def _chat(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1/chat/completions"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _answers(port: int, path: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
        return True
    return False


def _idle() -> float:
    """The share of a core that all processes under this one use while nothing is asked."""

    def used() -> float:
        times = [
            child.cpu_times() for child in psutil.Process(os.getpid()).children(recursive=True)
        ]
        return sum(one.user + one.system for one in times)

    before = used()
    time.sleep(IDLE_SECONDS)
    return (used() - before) / IDLE_SECONDS
