"""`sglang`: tokens a second of the real SGLang engine on the CPU, through turnmill and asked directly.

One engine serves both, in turn, so that neither has a colder cache or another neighbour. Through turnmill,
producer, server and engine share the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable

from benchmarks.conditions import conditions
from benchmarks.environments import sglang_python
from benchmarks.farm import ROOT, server, server_version
from benchmarks.measure import Spread
from benchmarks.report import COUNT, RATIO, Result, Row

GOAL, GOAL_KEEPING = 0.90, 0.98

Say = Callable[[str], None]


def run(rounds: int, say: Say) -> Result:
    python = sglang_python(say)
    say("starting SGLang")
    rates: dict[str, list[float]] = {"turnmill": [], "direct": [], "keeping": []}
    with server() as on, tempfile.TemporaryFile("w+") as errors:
        command = [str(python), "-m", "benchmarks.sglang_process", str(rounds), sys.executable]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "REDIS_URL": on.url},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            measured = json.loads(line)
            rate = measured["tokens"] / measured["seconds"]
            rates[measured["contender"]].append(rate)
            say(f"{measured['contender']}: {rate:.0f} tokens/s")
        if process.wait():
            errors.seek(0)
            said = errors.read()[-3000:]
            raise RuntimeError(f"the measuring process ended with {process.returncode}: {said}")
    turnmill, direct, keeping = (
        Spread.of(rates[name]) for name in ("turnmill", "direct", "keeping")
    )
    return Result(
        "sglang",
        "SGLang on the CPU, through turnmill and directly",
        [
            Row("ratio_vs_direct", "turnmill / direct", turnmill.over(direct), RATIO, GOAL),
            Row(
                "keeping_ratio",
                "answers kept while they grow, twice a second / not kept",
                keeping.over(turnmill),
                RATIO,
                GOAL_KEEPING,
            ),
            Row("turnmill_tokens_per_s", "turnmill, tokens/s", turnmill, COUNT),
            Row("direct_tokens_per_s", "direct, tokens/s", direct, COUNT),
        ],
        {
            "engine": "SGLang 0.5.23, a Qwen2 of 150,000 random weights, float32, 32 requests at once; 128 prompts of "
            "about 80 tokens, 128 tokens each",
            "direct": "`agenerate` for all prompts at once, rendered by the model's chat template in threads",
            "turnmill": "`turnmill run` in a process, a server in another, the worker around the engine; from the "
            "first ENQUEUE to the last turn's end",
            "keeping": "`--keep-every 0.5`, ten times as often as the default",
        },
        conditions(server_version()),
    )
