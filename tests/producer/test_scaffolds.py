"""Scaffolds are found, and take the options that they have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from turnmill.errors import BadLines, UsageError
from turnmill.scaffolds import Ended, Scaffold, read_plain
from turnmill.scaffolds.finding import find, names

MODULE = """
from turnmill.scaffolds import Ended, Scaffold

async def drive(item, ask):
    return Ended([])

plain = Scaffold(drive)

def made(*, steps: int = 64, sandbox: str = "auto") -> Scaffold:
    return Scaffold(drive, options={"steps": steps, "sandbox": sandbox})

def wrong():
    return 7

number = 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "scaffolds_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "scaffolds_of_a_test", raising=False)
    return "scaffolds_of_a_test"


def test_by_name() -> None:
    assert "multi_turn_chat" in names()
    assert isinstance(find("multi_turn_chat", {}), Scaffold)


def test_by_module(module: str) -> None:
    assert find(f"{module}:plain", {}).options == {}
    assert find(f"{module}:made", {}).options == {"steps": 64, "sandbox": "auto"}
    assert find(f"{module}:made", {"steps": "3"}).options == {"steps": 3, "sandbox": "auto"}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("nothing", {}, "'nothing' is unknown; there are .*multi_turn_chat"),
        ("multi_turn_chat", {"steps": "3"}, "takes no options"),
        ("nowhere_at_all:x", {}, "cannot be imported: No module named 'nowhere_at_all'"),
        ("MODULE:nothing", {}, "cannot be imported: .*nothing"),
        ("MODULE:made", {"step": "3"}, "no option 'step'; it has steps, sandbox"),
        ("MODULE:made", {"steps": "three"}, "steps: .*integer"),
        ("MODULE:wrong", {}, "returned int"),
        ("MODULE:number", {}, "neither a Scaffold nor makes one"),
    ],
)
def test_what_is_none(module: str, name: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find(name.replace("MODULE", module), options)


def test_plain_lines(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "a", "x": 1}\n{"x": 1, "id": 7}\n')
    one, two = read_plain(str(file)).items
    assert (one.id, two.id, two.fields["x"]) == ("a", "7", 1)
    assert one.digest != two.digest
    file.write_text('{"x": 1}\n{"id": "a"}\n{"id": "a"}\n')
    with pytest.raises(BadLines, match=r"(?s):1: id: must be.*:3: id 'a' is taken by line 2"):
        read_plain(str(file))


def test_an_ending_holds_what_it_is_given() -> None:
    assert Ended([], "turns", ending="max_steps", score=0.5).failed is None
