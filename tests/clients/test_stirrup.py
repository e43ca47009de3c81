"""Agents of the real stirrup, on Python 3.12: their turns go through the queue, and their tools are effects."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.clients.environments import python_of
from tests.processes import SimWorker, until

from turnmill.settings import Farm

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

COUNT = 6
AGENT = """
from pathlib import Path
from pydantic import BaseModel
from stirrup import Agent
from stirrup.core.models import Tool, ToolResult
from turnmill.scaffolds.stirrup import Silent

class Params(BaseModel):
    product_of: list[int]

def agent(client, item):
    async def multiply(params):
        with open("calls", "a") as log:
            log.write(item.id + "\\n")
        one, two = params.product_of
        return ToolResult(content=str(one * two))

    tool = Tool(name="multiply", description="Multiply", parameters=Params, executor=multiply)
    return Agent(client, "counting", tools=[tool], logger=Silent())

def score(item, finish, messages):
    return finish.reason == item.fields["answer"]
"""


@pytest.fixture(scope="session")
def python() -> Path:
    return python_of("stirrup", (3, 12))


@pytest.fixture
def play(tmp_path: Path) -> Path:
    scenes = []
    for i in range(COUNT):
        calls = [
            {"name": "multiply", "arguments": {"product_of": [i, 7]}},
            {"name": "multiply", "arguments": {"product_of": "wrong"}},
        ]
        finish = {"name": "finish", "arguments": {"reason": str(i * 7), "paths": []}}
        answers = [{"tool_calls": calls}, {"content": "So:", "tool_calls": [finish]}]
        scenes.append({"users": [f"What is {i} * 7?"], "answers": answers})
    scenes.append({"users": ["Talk"], "answers": [{"content": "one two three"}]})
    path = tmp_path / "play.jsonl"
    path.write_text("".join(json.dumps(scene) + "\n" for scene in scenes))
    return path


class Runs:
    """Runs the scaffold in the environment of stirrup."""

    def __init__(self, python: Path, folder: Path, farm: Farm) -> None:
        self._python, self.folder, self.farm = python, folder, farm
        self._environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(folder),
            "PYTHONPATH": str(folder),
            "REDIS_URL": farm.url,
            "TURNMILL_NAMESPACE": farm.namespace,
        }
        (folder / "counting.py").write_text(AGENT)
        tasks = [
            {"id": f"t{i}", "task": f"What is {i} * 7?", "answer": str(i * 7)} for i in range(COUNT)
        ]
        self.write(tasks)

    def write(self, tasks: list[dict[str, Any]]) -> None:
        (self.folder / "tasks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))

    def start(self, run: str, *more: str) -> subprocess.Popen[str]:
        agent = ("--set", "agent=counting:agent", "--set", "score=counting:score")
        line = [
            "run",
            "tasks.jsonl",
            "--run",
            run,
            "--scaffold",
            "stirrup",
            "--json",
            *agent,
            *more,
        ]
        return subprocess.Popen(
            [self._python, "-m", "turnmill", *line],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, run: str, *more: str, exits: int = 0) -> dict[str, Any]:
        process = self.start(run, *more)
        out, err = process.communicate(timeout=120)
        assert process.returncode == exits, err
        report = json.loads(out)
        assert isinstance(report, dict)
        return report

    def results(self, run: str) -> list[dict[str, Any]]:
        lines = (self.folder / "runs" / run / "replies.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def runs(python: Path, tmp_path: Path, farm: Farm) -> Runs:
    return Runs(python, tmp_path, farm)


def test_agents_run_and_are_scored(
    runs: Runs, worker: Callable[..., SimWorker], play: Path
) -> None:
    worker(sim=("--play", str(play)))
    report = runs("run")
    assert report["endings"] == {"finished": COUNT}
    assert report["scores"] == {"count": COUNT, "mean": 1.0}
    assert len(runs.calls()) == COUNT
    first = runs.results("run")
    said = [message for message in first[3]["messages"] if message["role"] == "tool"]
    # Tools answer with a list of parts, and their name.
    assert said[0]["content"] == [{"type": "text", "text": "21"}]
    assert said[0]["name"] == "multiply"
    assert said[1]["content"] == [{"type": "text", "text": "Tool arguments are not valid"}]
    assert runs("run")["asked"] == 0
    assert runs.results("run") == first
    assert len(runs.calls()) == COUNT, "no tool is run again"


def test_calls_that_are_none_are_told_again_as_calls(
    runs: Runs, worker: Callable[..., SimWorker], tmp_path: Path
) -> None:
    """Some models write the ids of their calls themselves, and engines refuse messages with calls that they cannot read."""
    good = {"id": "multiply:0", "name": "multiply", "arguments": {"product_of": [6, 7]}}
    cut = {"id": "multiply:0", "name": "multiply", "arguments": '{"product_of": [6'}
    finish = {"name": "finish", "arguments": {"reason": "42", "paths": []}}
    answers = [{"tool_calls": [good, cut]}, {"tool_calls": [finish]}]
    play = tmp_path / "play.jsonl"
    play.write_text(json.dumps({"users": ["What is 6 * 7?"], "answers": answers}))
    worker(sim=("--play", str(play)))
    runs.write([{"id": "t", "task": "What is 6 * 7?", "answer": "42"}])
    assert runs("run")["endings"] == {"finished": 1}
    (result,) = runs.results("run")
    calls = next(one["tool_calls"] for one in result["messages"] if one.get("tool_calls"))
    told = [json.loads(call["function"]["arguments"]) for call in calls]
    assert told == [{"product_of": [6, 7]}, {"malformed": '{"product_of": [6'}]
    answered = [one for one in result["messages"] if one["role"] == "tool"]
    assert [one["tool_call_id"] for one in answered[:2]] == [call["id"] for call in calls]
    assert len({call["id"] for call in calls}) == 2
    assert answered[1]["content"][0]["text"] == "Tool arguments are not valid"


def test_killed_and_run_again(runs: Runs, worker: Callable[..., SimWorker], play: Path) -> None:
    slow = ("--play", str(play), "--latency", "0.4")
    one = worker("--slots", "2", lease=0.5, sim=slow)
    process = runs.start("run", "--concurrency", "2")
    until(lambda: len(runs.calls()) >= 2, "agents are under way", 60)
    one.kill()
    worker("--slots", "2", lease=0.5, sim=slow)
    until(lambda: len(runs.calls()) >= 4, "and go on", 60)
    process.kill()
    process.communicate()
    report = runs("run")
    assert report["endings"] == {"finished": COUNT}
    assert report["scores"]["mean"] == 1.0
    assert report["from_store"] > 0
    assert report["asked"] + report["from_store"] == 2 * COUNT


def test_a_dry_run_leaves_nothing_behind(
    runs: Runs, worker: Callable[..., SimWorker], play: Path
) -> None:
    """It opens the agents' sessions, to see their tools, and closes them; no tool is run."""
    agent = AGENT.replace("tools=[tool]", "tools=[tool, Sandbox(temp_base_dir='tmp')]")
    sandbox = "from stirrup.tools.code_backends.local import LocalCodeExecToolProvider as Sandbox"
    (runs.folder / "counting.py").write_text(f"{sandbox}\n{agent}")
    worker(sim=("--play", str(play)))
    assert runs("run", "--model", "sim", "--dry-run")["conversations"]["not_begun"] == COUNT
    assert list((runs.folder / "tmp").iterdir()) == []
    assert runs("run")["endings"] == {"finished": COUNT}
    with redis.Redis.from_url(runs.farm.url) as connection:
        connection.delete(runs.farm.keys.journal("run"))
    found = runs("run", "--model", "sim", "--dry-run")
    assert (found["conversations"]["begun"], found["effects"]) == (COUNT, COUNT)
    assert list((runs.folder / "tmp").iterdir()) == []
    assert len(runs.calls()) == COUNT


def test_what_meets_a_limit(runs: Runs, worker: Callable[..., SimWorker], play: Path) -> None:
    worker(sim=("--play", str(play), "--context", "400"))
    runs.write([{"id": "long", "task": "word " * 500}, {"id": "talk", "task": "Talk"}])
    report = runs("run", "--set", "max_tokens=2", "--max-failures", "100%")
    assert report["endings"] == {"context_overflow": 1, "output_limit": 1}
    assert report["outcomes"]["capped"] == 2


def test_a_task_that_is_none(runs: Runs) -> None:
    runs.write([{"id": "a", "task": "b"}, {"id": "c"}])
    process = runs.start("run")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "tasks.jsonl:2: task: must be a string" in err
