"""`turnmill why`: which fields of two turns differ."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnmill.client import Client
from turnmill.errors import UsageError
from turnmill.results import ConversationResult, TurnResult
from turnmill.settings import Farm
from turnmill.turn import Turn
from turnmill.why import ABSENT, Difference, differences, find_hash

Why = Callable[..., subprocess.CompletedProcess[str]]


def turn(*contents: Any, **fields: Any) -> Turn:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return Turn.model_validate({"model": "m", "messages": messages, **fields})


@pytest.fixture
def why(farm: Farm, tmp_path: Path) -> Why:
    """Runs the command in a folder of its own, and sees that it ends as it should."""

    def run(*arguments: str, exits: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "turnmill", "why", *arguments],
            cwd=tmp_path,
            env={**os.environ, "REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == exits, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def stored(farm: Farm) -> Callable[..., list[str]]:
    """Asks for turns, and returns their hashes."""

    async def submit(turns: tuple[Turn, ...]) -> list[str]:
        async with Client(farm.url, namespace=farm.namespace, run="run") as client:
            return await client.submit_many(turns)

    return lambda *turns: asyncio.run(submit(turns))


# Values


@pytest.mark.parametrize(
    ("left", "right", "found"),
    [
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1.0}, []),
        ({"a": 1}, {"a": 2}, [("a", 1, 2)]),
        ({"a": 1}, {"a": True}, [("a", 1, True)]),
        ({"a": [False]}, {"a": [0]}, [("a[0]", False, 0)]),
        ({"a": None}, {}, [("a", None, ABSENT)]),
        ({}, {"b": {"c": 1}}, [("b", ABSENT, {"c": 1})]),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": 2}}}, [("a.b.c", 1, 2)]),
        ({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}, 4]}, [("a[1].b", 2, 3), ("a[2]", ABSENT, 4)]),
        ({"a": "x"}, {"a": ["x"]}, [("a", "x", ["x"])]),
        ({"a": {"x.y": 1, "": 2}}, {"a": {}}, [('a[""]', 2, ABSENT), ('a["x.y"]', 1, ABSENT)]),
        ({"a": 2**63}, {"a": 2**63 + 1}, [("a", 2**63, 2**63 + 1)]),
    ],
)
def test_where_two_values_differ(left: Any, right: Any, found: list[Any]) -> None:
    assert list(differences(left, right)) == [Difference(*one) for one in found]


# Turns


def test_it_names_each_field_down_to_the_message(
    why: Why, stored: Callable[..., list[str]]
) -> None:
    one = turn("Hello", "Hi", "Bye", sampling={"temperature": 0.5, "seed": 3})
    other = turn("Hello", "Ho", sampling={"temperature": 1, "top_p": 0.9, "seed": 3}, sample=4)
    a, b = stored(one, other)
    report = json.loads(why(a, b, "--json").stdout)
    assert (report["same"], report["left"], report["right"]) == (False, a, b)
    assert report["differences"] == [
        {"path": "messages[1].content", "left": "Hi", "right": "Ho"},
        {"path": "messages[2]", "left": {"role": "user", "content": "Bye"}},
        {"path": "sample", "left": 0, "right": 4},
        {"path": "sampling.temperature", "left": 0.5, "right": 1},
        {"path": "sampling.top_p", "right": 0.9},
    ]
    lines = why(a, b).stdout.splitlines()
    assert lines[:3] == ["messages[1].content", '  A  "Hi"', '  B  "Ho"']
    assert "  B  (absent)" in lines
    assert lines[-1] == f"5 differences between A, {a[:12]}, and B, {b[:12]}."


def test_two_draws_are_called_by_that_name(why: Why, stored: Callable[..., list[str]]) -> None:
    a, b = stored(turn("Hello"), turn("Hello", sample=1))
    assert why(a, b).stdout.splitlines()[-1].startswith("Two draws of one question")


def test_one_turn_is_said_to_be_the_same_and_what_is_not_hashed_is_named(
    why: Why, stored: Callable[..., list[str]]
) -> None:
    (a,) = stored(turn("Hello"))
    said = why(a, a).stdout
    assert said.startswith(f"Same turn: {a}\n")
    assert "priority" in said
    report = json.loads(why(a, a, "--json").stdout)
    assert (report["same"], report["differences"]) == (True, [])
    assert "priority" in report["not_hashed"]


def test_long_texts_are_shown_where_they_part(why: Why, stored: Callable[..., list[str]]) -> None:
    a, b = stored(turn("x" * 5000 + "left" + "y" * 900), turn("x" * 5000 + "right" + "y" * 900))
    _, left, right, _ = why(a, b).stdout.splitlines()
    assert "xxxleftyyy" in left
    assert "xxxrightyyy" in right
    assert max(len(left), len(right)) < 250


@pytest.mark.parametrize("name", ["0" * 64, "0" * 12, "A" * 64, "run/c", "run/c/x", "run/c/-1"])
def test_a_turn_that_is_not_known_is_one_line(name: str, why: Why) -> None:
    done = why(name, name, exits=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("turnmill: turn ")
    assert name in line
    assert done.stdout == ""


def test_a_damaged_body_is_one_line(why: Why, farm: Farm, stored: Callable[..., list[str]]) -> None:
    a, b = stored(turn("Hello"), turn("Bye"))

    async def damage(body: bytes) -> None:
        async with farm.connect() as redis:
            await redis.set(farm.keys.body(b), body)

    for body, said in ((b"{", "cannot be read"), (turn("Hello").body, f"is that of {a}")):
        asyncio.run(damage(body))
        (line,) = why(a, b, exits=2).stderr.splitlines()
        assert said in line


# Turns of a run's files


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a run of a conversation whose id is awkward, two epochs of it."""
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    lines = [
        ConversationResult(
            id="a/b@1",
            epoch=epoch,
            outcome="completed",
            messages=[],
            turns=[TurnResult(hash=f"{epoch}{i}" * 32) for i in range(2)],
        ).model_dump_json()
        for epoch in range(2)
    ]
    (folder / "replies.partial.jsonl").write_text("\n".join([*lines, ""]))
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("name", "found"), [("r/a/b@1/0", "00"), ("r/a/b@1/1", "01"), ("r/a/b@1@1/1", "11")]
)
def test_a_turn_is_found_by_its_place_in_a_run(runs: Path, name: str, found: str) -> None:
    assert find_hash(name, runs) == found * 32


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("r/a/b@1/2", "has 2 turns, from 0"),
        ("r/a/0", "no conversation 'a' has ended"),
        ("r/a/b@1@7/0", "no conversation"),
        ("other/a/0", "there are no replies in it"),
        ("../a/0", "run '..'"),
    ],
)
def test_a_place_that_is_none_is_refused(runs: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_hash(name, runs)
