"""Agents in sandboxes, through the real queue: killed in the middle and started again, and every way in which they end.

The engine plays what is written, so the agents are right; all else is real. Each sandbox has a process of its own that nobody waits
for, by whose argument a test knows how many sandboxes live.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from tests.acceptance.conftest import Cli
from tests.processes import SimWorker, until
from tests.sandboxing import a_kind, path_with_bubblewrap

from turnmill.scaffolds.vanillux.prompts import DONE, opening
from turnmill.settings import Farm

EXAMPLES = Path(__file__).parents[2] / "examples" / "terminal-tasks.jsonl"
SUBMIT = f"echo {DONE}"

SOLVED = {
    "backup-script": (
        "cat backup.sh",
        "cat > fixed <<'END'\n"
        "#!/bin/bash\n"
        'archive=$(realpath -m -- "$2")\n'
        'cd -- "$1" || exit\n'
        'find . -maxdepth 1 -type f -print0 | tar -czf "$archive" --null -T -\n'
        "END\n",
        "mkdir 'a b' && echo 1 > 'a b/c d' && bash fixed 'a b' x.tgz && tar -tzf x.tgz",
        "cat fixed > backup.sh; rm -r fixed 'a b' x.tgz",
        SUBMIT,
    ),
    "primes": (
        "export LAST='[[ $1 =~ ^[0-9]+$ ]] || exit 2'; mkdir work; cd work",
        "cat > primes.sh <<END\n$LAST\nEND\npwd",
        "cat >> primes.sh <<'END'\n"
        "for ((n = 2; n <= $1; n++)); do\n"
        "  for ((d = 2; d * d <= n; d++)); do ((n % d)) || continue 2; done\n"
        "  echo $n\n"
        "done\n"
        "END\n",
        "bash primes.sh 20 | tail -n 2; mv primes.sh ..; cd -",
        f"ls primes.sh && {SUBMIT}",
    ),
    "access-log": (
        "head -n 3 access.log; wc -l access.log",
        "awk '$9 == 404 {print $1}' access.log | sort | uniq -c | sort -rn > counts",
        "head -n 2 counts",
        "awk 'NR == 1 {print $2, $1}' counts > answer.txt",
        f"cat answer.txt; {SUBMIT}",
    ),
}
WRONG = ("echo 10.0.0.1 9 > answer.txt", "cat answer.txt", "echo nearly", "true", SUBMIT)
NEARLY = ("--hang-if", "nearly")
"""No worker with this goes on after that command."""


class Stage:
    """A run of vanillux with bubblewrap, and what the engine plays in it."""

    def __init__(self, cli: Cli, farm: Farm, start_worker: Callable[..., SimWorker]) -> None:
        self.cli, self._farm, self.start_worker = cli, farm, start_worker
        cli.environment["PATH"] = path_with_bubblewrap()
        self._mark = a_long_time()
        self._tasks: list[dict[str, Any]] = []
        self._scenes: list[dict[str, Any]] = []
        self._options: dict[str, float] = {}

    def set(self, **options: float) -> None:
        """Options of the scaffold; before all tasks, for the prompt names them."""
        self._options = options

    def task(self, fields: dict[str, Any], *commands: str | dict[str, Any]) -> None:
        """A task, and the commands by which it is played: text, or the arguments of a call as they are."""
        behind = f"setsid sleep {self._mark} > /dev/null 2>&1 & "
        first, *others = commands
        calls = [behind + first if isinstance(first, str) else first, *others]
        given = self._options.get
        _, user = opening(
            fields["prompt"],
            seconds=given("command_seconds", 120.0),
            most=10_000,
            steps=int(given("steps", 64)),
        )
        answers = [
            call if isinstance(call, dict) else {"name": "bash", "arguments": {"command": call}}
            for call in calls
        ]
        self._tasks.append(fields)
        scene = {
            "users": [user.content],
            "answers": [{"tool_calls": [answer]} for answer in answers],
        }
        self._scenes.append(scene)

    def worker(self, *sim: str) -> SimWorker:
        play = self.cli.write(self._scenes, "play.jsonl")
        self.cli.write(self._tasks)
        return self.start_worker(sim=("--play", str(play), *sim))

    def line(self, *more: str, run: str = "run") -> tuple[str, ...]:
        options = [part for n, v in self._options.items() for part in ("--set", f"{n}={v:g}")]
        scaffold = ("--scaffold", "vanillux", "--set", "sandbox=bubblewrap", *options)
        return ("run", "in.jsonl", "--run", run, *scaffold, "--json", *more)

    def report(self, *more: str, run: str = "run") -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.cli(*self.line(*more, run=run)).stdout)
        return report

    def results(self, run: str = "run", name: str = "replies.jsonl") -> dict[str, dict[str, Any]]:
        lines = (self.cli.folder / "runs" / run / name).read_text().splitlines()
        return {result["id"]: result for result in map(json.loads, lines)}

    def written(self, run: str = "run") -> int:
        """Effects in the journal: two for each answer with a command."""
        with redis.Redis.from_url(self._farm.url) as connection:
            return connection.hlen(self._farm.keys.journal(run))  # type: ignore[return-value]

    def sandboxes(self) -> list[psutil.Process]:
        """One process of each sandbox that lives."""
        return with_argument(self._mark)

    def are_gone(self) -> None:
        until(lambda: not self.sandboxes(), "no sandbox is left")


def a_long_time() -> str:
    """Seconds, of this test alone."""
    return f"9{time.time_ns() % 10**12}"


def with_argument(word: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if word in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def stage(
    on_farm: Cli, farm: Farm, worker: Callable[..., SimWorker], request: pytest.FixtureRequest
) -> Iterator[Stage]:
    a_kind("bubblewrap")
    made = Stage(on_farm, farm, worker)
    yield made
    for process in made.sandboxes():  # of a test that failed
        process.kill()


def outputs(result: dict[str, Any]) -> list[str]:
    return [message["content"] for message in result["messages"] if message["role"] == "tool"]


def graded(results: dict[str, dict[str, Any]]) -> dict[str, tuple[str, str, float]]:
    return {id: (r["outcome"], r["ending"], r["score"]) for id, r in results.items()}


def test_tasks_are_solved_through_the_death_of_a_worker_and_of_the_producer(stage: Stage) -> None:
    for fields in map(json.loads, EXAMPLES.read_text().splitlines()):
        stage.task(fields, *SOLVED[fields["id"]])
        if fields["id"] == "access-log":
            prompt = f"{fields['prompt']} Guess."
            stage.task({**fields, "id": "guessed", "prompt": prompt}, *WRONG)
    doomed = stage.worker("--latency", "0.25", *NEARLY)
    killed = stage.cli.start(*stage.line())
    until(lambda: len(stage.sandboxes()) == 4, "all have begun")
    other = stage.worker("--latency", "0.25", *NEARLY)
    doomed.kill()
    until(lambda: stage.written() >= 16, "they go on without this worker")
    assert stage.sandboxes()
    killed.kill()
    killed.communicate()
    other.kill()
    stage.are_gone()
    before = stage.written()
    ended = stage.results(name="replies.partial.jsonl")
    assert len(ended) < 4

    stage.worker()
    report = stage.report()
    after = stage.results()
    assert graded(after) == {
        "backup-script": ("completed", "submitted", 1.0),
        "primes": ("completed", "submitted", 1.0),
        "access-log": ("completed", "submitted", 1.0),
        "guessed": ("completed", "submitted", 0.0),
    }
    assert report["from_store"] > 0
    assert (report["endings"], report["scores"]) == ({"submitted": 4}, {"count": 4, "mean": 0.75})
    assert before < stage.written() == 4 * (5 * 2 + 1)
    for id, result in ended.items():
        assert after[id] == result
    for result in after.values():
        assert "done_again_differently" not in result["details"]
        assert result["details"]["commands"] == result["details"]["steps"] == 5
    stage.are_gone()

    # As if nothing had happened.
    stage.report(run="undisturbed")
    undisturbed = stage.results("undisturbed")
    assert graded(undisturbed) == graded(after)
    for id, result in undisturbed.items():
        assert outputs(after[id])[1:] == outputs(result)[1:]

    # All is known, so nothing is run: there need not be a sandbox that works.
    again = stage.report()
    assert again["asked"] == 0
    assert graded(stage.results()) == graded(after)
    stage.are_gone()


def test_a_sandbox_is_made_again_and_what_comes_out_differently_is_said(stage: Stage) -> None:
    stage.task(
        {"id": "dice", "prompt": "Throw", "check": "test -s number"},
        "mkdir deep; cd deep; export SAID=kept",
        "echo $RANDOM$RANDOM$RANDOM | tee ../number",
        "pwd; echo on > on",
        'echo "$SAID ${PWD##*/} $(cat on)"; cat ../number',
        SUBMIT,
    )
    hanging = stage.worker("--hang-if", "/work/deep")
    killed = stage.cli.start(*stage.line())
    until(lambda: stage.written() == 6, "three commands have been run")
    killed.kill()
    killed.communicate()
    hanging.kill()
    stage.are_gone()
    stage.worker()
    process = stage.cli(*stage.line())
    (result,) = stage.results().values()
    assert (result["ending"], result["score"]) == ("submitted", 1.0)
    assert result["details"]["done_again_differently"] == ["answer 2, command 1"]
    assert "conversation dice: effect answer 2, command 1 was {'exit': 0" in process.stderr
    thrown, later = outputs(result)[1].splitlines()[0], outputs(result)[3].splitlines()
    # Told is what was written down; what is there is what came of doing it again.
    assert later[0] == "kept deep on"
    assert later[1].isdigit()
    assert thrown != later[1]
    stage.are_gone()


def test_every_ending(stage: Stage) -> None:
    stage.set(steps=6, command_seconds=3.0, total_seconds=4.0)
    stage.task({"id": "submitted", "prompt": "A", "check": "true"}, SUBMIT)
    stage.task({"id": "context_overflow", "prompt": "B", "check": "false"}, "seq 5000", SUBMIT)
    stage.task({"id": "max_steps", "prompt": "C", "check": "test -e x"}, "touch x", *["true"] * 5)
    stage.task({"id": "timeout", "prompt": "D"}, "sleep 60", "sleep 60", SUBMIT)
    bad = [
        {"name": "bash", "arguments": text} for text in ('{"command": ', '["ls"]', '{"do": "ls"}')
    ]
    stage.task({"id": "format_errors", "prompt": "E"}, "echo 1", *bad, SUBMIT)
    one = a_long_time()
    stage.task({"id": "error", "prompt": "F", "check": "true"}, f"sleep {one}", SUBMIT)
    stage.worker("--context", "2000")
    run = stage.cli.start(*stage.line("--max-failures", "6"))
    (inside,) = until(lambda: with_argument(one), "the sandbox to be killed is there")
    (sandbox,) = (p for p in inside.parents() if p.ppid() == run.pid)
    sandbox.kill()
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err
    results = stage.results()
    assert {id: result["ending"] for id, result in results.items()} == {id: id for id in results}
    report = json.loads(out)
    assert report["endings"] == dict.fromkeys(sorted(results), 1)
    assert report["outcomes"] == {"completed": 2, "capped": 3, "failed": 1, "cancelled": 0}
    assert report["capped"] == {"output": 0, "context": 1, "turns": 1, "time": 1}
    assert {id: result["score"] for id, result in results.items()} == {
        "submitted": 1.0,
        "context_overflow": 0.0,
        "max_steps": 1.0,
        "timeout": None,
        "format_errors": None,
        "error": None,
    }
    assert "the sandbox has ended with exit code" in results["error"]["error"]
    assert outputs(results["timeout"])[0] == (
        "[killed after 3 seconds, with all that it had started, no output]"
    )
    assert [text.partition(",")[0] for text in outputs(results["format_errors"])[1:]] == [
        "Error: the arguments are not a JSON object",
        "Error: the arguments are not a JSON object",
        'Error: the arguments have no text "command"',
    ]
    stage.are_gone()

    # A sandbox that died is no answer: what it was doing is done by the next attempt. All others have ended.
    report = stage.report("--max-failures", "6")
    assert report["asked"] == 1
    again = stage.results()
    assert (again["error"]["ending"], again["error"]["score"]) == ("submitted", 1.0)
    assert all(again[id] == results[id] for id in results if id != "error")
    stage.are_gone()


def test_time_is_up_within_an_answer(stage: Stage) -> None:
    """Models call for the same dozens of times in one answer, too. Whoever goes on stops at the same one."""
    stage.set(command_seconds=0.2, total_seconds=0.5)
    user = opening("Wait", seconds=0.2, most=10_000, steps=64)[1].content
    sleep = {"name": "bash", "arguments": {"command": "sleep 60"}}
    play = [{"users": [user], "answers": [{"tool_calls": [sleep] * 40}]}]
    stage.cli.write([{"id": "a", "prompt": "Wait"}])
    stage.start_worker(sim=("--play", str(stage.cli.write(play, "play.jsonl"))))
    first = stage.report()
    assert first["endings"] == {"timeout": 1}
    (result,) = stage.results().values()
    assert result["details"]["commands"] == len(outputs(result)) == 3
    assert stage.report()["asked"] == 0
    assert stage.results() == {"a": result}


def test_what_a_model_leaves_behind_does_not_pass_for_it(stage: Stage) -> None:
    failing = {"check": "./check.sh", "check_files": {"check.sh": "#!/bin/bash\nexit 1\n"}}
    passing = {**failing, "check_files": {"check.sh": "#!/bin/bash\n"}}
    link = "echo 'exit 0' > mine; ln -s mine check.sh"
    stage.task({"id": "its own check", "prompt": "A", **failing}, link, SUBMIT)
    for_check = "cd; export BASH_ENV=$PWD/x; echo 'exit 0' | tee x /run/turnmill/check > /work/bash"
    stage.task({"id": "its own shell", "prompt": "B", **failing}, for_check, SUBMIT)
    stage.task({"id": "in the way", "prompt": "C", **passing}, "mkdir -p check.sh/x", SUBMIT)
    stage.worker()
    stage.report()
    results = stage.results()
    assert set(graded(results).values()) == {("completed", "submitted", 0.0)}
    assert "check.sh" in results["in the way"]["details"]["check"]["output"]


def test_an_interrupted_run_leaves_no_sandbox(stage: Stage) -> None:
    for number in range(5):
        stage.task({"id": f"{number}", "prompt": f"{number}"}, "echo", "sleep 60", SUBMIT)
    stage.worker()
    run = stage.cli.start(*stage.line())
    until(lambda: len(stage.sandboxes()) == 5 and stage.written() == 10, "all wait")
    run.terminate()
    _, err = run.communicate(timeout=60)
    assert run.returncode == 143
    assert "Traceback" not in err
    assert not stage.sandboxes(), "they end before the producer does"


# Sandboxes that are not there


@pytest.fixture
def no_sandboxes(on_farm: Cli) -> Cli:
    """Bash and what it needs are on the PATH, bwrap and docker are not."""
    there = on_farm.folder / "bin"
    there.mkdir()
    for name in ("bash", "cat", "grep", "head", "mv", "rm", "tar", "touch"):
        found = shutil.which(name)
        assert found is not None
        (there / name).symlink_to(found)
    on_farm.environment |= {"PATH": str(there), "TMPDIR": str(on_farm.folder)}
    return on_farm


VANILLUX = ("run", "in.jsonl", "--run", "r", "--scaffold", "vanillux")


def test_without_a_sandbox_nothing_is_run(no_sandboxes: Cli) -> None:
    no_sandboxes.write([{"id": "a", "prompt": "Do"}])
    for more in ((), ("--dry-run",), ("--set", "sandbox=bubblewrap", "--unsafe-local")):
        (said,) = no_sandboxes(*VANILLUX, *more, exits=2).stderr.splitlines()
        assert "no bwrap on the PATH" in said
    (said,) = no_sandboxes(*VANILLUX, "--set", "sandbox=local", exits=2).stderr.splitlines()
    assert "--unsafe-local allows it" in said
    assert not (no_sandboxes.folder / "runs").exists()


def test_without_a_sandbox_if_that_is_allowed(
    no_sandboxes: Cli, worker: Callable[..., SimWorker]
) -> None:
    task = {"id": "a", "prompt": "Do", "files": {"x": "7"}, "check": "test -e y"}
    no_sandboxes.write([task])
    user = opening("Do", seconds=120.0, most=10_000, steps=64)[1].content
    mark = a_long_time()
    commands = (f"setsid sleep {mark} & touch y; cat x", SUBMIT)
    calls = [{"name": "bash", "arguments": {"command": command}} for command in commands]
    scene = {"users": [user], "answers": [{"tool_calls": [call]} for call in calls]}
    worker(sim=("--play", str(no_sandboxes.write([scene], "play.jsonl"))))
    report = json.loads(no_sandboxes(*VANILLUX, "--unsafe-local", "--json").stdout)
    assert (report["endings"], report["scores"]["mean"]) == ({"submitted": 1}, 1.0)
    assert not list(no_sandboxes.folder.glob("turnmill-vanillux-*"))
    assert not with_argument(mark)
    # It is another run, with other commands for the same task.
    manifest = no_sandboxes(*VANILLUX, "--set", "steps=3", "--unsafe-local", exits=2).stderr
    assert "was begun with other" in manifest


@pytest.mark.parametrize("scaffold", ["multi_turn_chat", "mine:mine"])
def test_unsafe_local_is_for_scaffolds_that_run_commands(on_farm: Cli, scaffold: str) -> None:
    on_farm.conversations(1)
    (on_farm.folder / "mine.py").write_text("def mine(*, steps: int = 1): ...\n")
    line = ("run", "in.jsonl", "--run", "r", "--scaffold", scaffold, "--unsafe-local")
    (said,) = on_farm(*line, exits=2).stderr.splitlines()
    assert said == f"turnmill: --unsafe-local: scaffold {scaffold!r} has no sandbox to do without"


def test_a_dry_run_starts_no_sandbox(stage: Stage) -> None:
    """But it tries whether one could be started."""
    stage.task({"id": "a", "prompt": "A", "check": "true"}, "echo nearly", SUBMIT)
    hanging = stage.worker(*NEARLY)
    folder = Path(tempfile.mkdtemp(prefix="tm"))
    try:
        folder.chmod(0o755)
        log, script = folder / "log", folder / "bwrap"
        log.touch()
        log.chmod(0o666)  # a sandbox of root's is nobody's
        there = shutil.which("bwrap", path=path_with_bubblewrap())
        script.write_text(f'#!/bin/sh\necho "$*" >> {log}\nexec {there} "$@"\n')
        script.chmod(0o755)
        stage.cli.environment["PATH"] = f"{folder}:{os.environ['PATH']}"

        def outlook() -> dict[str, Any]:
            log.write_text("")
            found: dict[str, Any] = json.loads(stage.cli(*stage.line("--dry-run")).stdout)
            version, tried = log.read_text().splitlines()
            assert version == "--version"
            assert tried.endswith("bash -c exit 0")
            return found

        assert outlook()["conversations"]["not_begun"] == 1
        killed = stage.cli.start(*stage.line())
        until(lambda: stage.written() >= 2, "it has begun")
        killed.kill()
        killed.communicate()
        hanging.kill()
        assert outlook()["conversations"]["begun"] == 1
        stage.worker()
        stage.report()
        assert outlook()["conversations"]["complete"] == 1
    finally:
        shutil.rmtree(folder)
