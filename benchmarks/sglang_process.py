"""One process with one SGLang engine, asked in turn directly and through turnmill. Run by sglang.py in
SGLang's own environment; prints one line of JSON for each measurement.

    python -m benchmarks.sglang_process ROUNDS PRODUCER_PYTHON   (REDIS_URL is set)
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines import sglang_env

PROMPTS, TOKENS = 128, 128
NEVER, OFTEN = 3600.0, 0.5
"""Seconds between two keepings. The answers here take some seconds: often is several times in each."""
TEXT = "the quick brown fox jumps over the lazy dog. "


@dataclass(frozen=True)
class Measured:
    """Tokens and the seconds that they took."""

    contender: str
    tokens: int
    seconds: float


def main() -> None:
    sglang_env.prepare()
    from tests.engines import tiny_model
    from transformers import AutoTokenizer

    from turnmill_worker.engines.base import EngineSettings
    from turnmill_worker.engines.sglang import build

    rounds, producer = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model.make(Path(folder) / "model")
        engine = build(
            EngineSettings(model=str(model), served_name="tiny", arguments=sglang_env.ARGUMENTS)
        )
        bench = Bench(engine, AutoTokenizer.from_pretrained(str(model)), producer, Path(folder))
        try:
            bench.direct("warm-up")
            bench.turnmill("warm-up")
            for number in range(rounds):
                contenders = [bench.direct, bench.turnmill, bench.keeping]
                for contender in contenders if number % 2 == 0 else reversed(contenders):
                    print(json.dumps(vars(contender(f"round {number}"))), flush=True)
        finally:
            engine.close()


class Bench:
    def __init__(self, engine: Any, tokenizer: Any, producer: str, folder: Path) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._producer, self._folder = producer, folder

    def direct(self, name: str) -> Measured:
        """`agenerate` for all prompts at once: the engine itself lets 32 in. The prompt is rendered by the
        model's chat template, in a thread; the engine gives text back."""
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}

        async def one(text: str) -> int:
            messages = [{"role": "user", "content": text}]
            ids = await asyncio.to_thread(
                self._tokenizer.apply_chat_template,
                messages,
                add_generation_prompt=True,
                return_dict=False,
            )
            output = await self._engine.agenerate(input_ids=ids, sampling_params=sampling)
            return int(output["meta_info"]["completion_tokens"])

        async def everything() -> int:
            return sum(await asyncio.gather(*(one(text) for text in _texts(f"direct {name}"))))

        started = time.perf_counter()
        tokens = asyncio.run(everything())
        return Measured("direct", tokens, time.perf_counter() - started)

    def turnmill(self, name: str) -> Measured:
        return self._through_turnmill("turnmill", name, keep_every=NEVER)

    def keeping(self, name: str) -> Measured:
        return self._through_turnmill("keeping", f"{name} keeping", keep_every=OFTEN)

    def _through_turnmill(self, contender: str, name: str, keep_every: float) -> Measured:
        """`turnmill run` in a process of its own, a server in another, and a worker around the engine here."""
        from turnmill.settings import Farm
        from turnmill_worker.settings import WorkerSettings
        from turnmill_worker.worker import TurnWorker

        run = name.replace(" ", "-")
        source = self._folder / f"{run}.jsonl"
        # Random weights end an answer anywhere; all are to be of one length.
        sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        # The model has one, which `agenerate` does not use; and with it, nothing can be kept.
        sampling["repetition_penalty"] = 1
        lines = (
            {"id": f"c{i}", "turns": [text], "sampling": sampling}
            for i, text in enumerate(_texts(f"queued {name}"))
        )
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [self._producer, "-m", "turnmill", "run", str(source), "--run", run, "--json"]
        command += ["--model", "tiny", "--concurrency", str(PROMPTS)]
        command += ["--out", str(self._folder / run)]

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        worker = TurnWorker(
            self._engine, Farm(os.environ["REDIS_URL"]), WorkerSettings(keep_every=keep_every)
        )

        async def produce() -> bytes:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.PIPE, env=_without_shims()
            )
            output, _ = await process.communicate()
            worker.stop()
            return output

        producing = loop.create_task(produce())
        worker.run()
        report = json.loads(loop.run_until_complete(producing))
        seconds = loop.run_until_complete(_span(self._folder / run / "replies.jsonl"))
        loop.close()
        assert report["outcomes"]["completed"] == PROMPTS, report
        return Measured(contender, report["tokens"]["completion"], seconds)


async def _span(replies: Path) -> float:
    """Seconds from the first turn's ENQUEUE to the last one's end: starting the producer is not in it."""
    from turnmill.client import Client
    from turnmill.output import read_results

    async with Client() as client:
        traces = [await client.trace(t.hash) for r in read_results(replies) for t in r.turns]
    times = [trace.times for trace in traces if trace is not None]
    assert len(times) == PROMPTS
    return max(t.finished or 0 for t in times) - min(t.enqueued or 0 for t in times)


def _texts(name: str) -> list[str]:
    return [f"{name}, prompt {i}: {TEXT * 3}" for i in range(PROMPTS)]


def _without_shims() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", *sglang_env.ENVIRONMENT)}


if __name__ == "__main__":
    main()
