"""Scaffolds are found, and take the options that they have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic_core import from_json, to_json

from turnmill.errors import BadLines, UsageError
from turnmill.manifest import check_unchanged, manifest_of
from turnmill.scaffolds import Ended, Scaffold, read_plain
from turnmill.scaffolds.finding import find, names
from turnmill.spec import Attempt, RunSpec, plan

MODULE = """
from turnmill.scaffolds import Ended, Loaded, Scaffold

async def drive(item, ask):
    return Ended([])

plain = Scaffold(drive)

def made(*, steps: int = 64, sandbox: str = "auto") -> Scaffold:
    return Scaffold(drive, options={"steps": steps, "sandbox": sandbox})

def wrong():
    return 7

number = 7

def breaks():
    return {}["key"]

def exits():
    raise SystemExit(0)

def reading(what):
    return lambda source, skip_bad: what() if callable(what) else what

class Thing:
    def __init__(self, id, digest="d"):
        self.id, self.digest = id, digest

reads_a_list = Scaffold(drive, reading([]))
reads_nothing = Scaffold(drive, reading(Loaded([], [])))
reads_badly = Scaffold(drive, reading(breaks))
reads_twice = Scaffold(drive, reading(Loaded([Thing("a"), Thing("b"), Thing("a")], [])))
reads_numbers = Scaffold(drive, reading(Loaded([Thing(7)], [])))
reads_no_ids = Scaffold(drive, reading(Loaded([object()], [])))
has_options = Scaffold(drive, reading(Loaded([Thing("a")], [])), {"t": (1, 2), 3: float("nan")})
has_odd_options = Scaffold(drive, reading(Loaded([Thing("a")], [])), {"t": object()})
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
        ("nothing", {}, "'nothing' is unknown; there are .*multi_turn_chat.*ATTRIBUTE$"),
        ("vanilux", {}, r"MODULE:ATTRIBUTE; did you mean vanillux\?"),
        ("multi_turn_chat", {"steps": "3"}, "takes no options"),
        ("nowhere_at_all:x", {}, "cannot be imported: No module named 'nowhere_at_all'"),
        ("MODULE:nothing", {}, "cannot be imported: .*nothing"),
        ("MODULE:made", {"step": "3"}, "no option 'step'; it has steps, sandbox"),
        ("MODULE:made", {"steps": "three"}, "steps: .*integer"),
        ("MODULE:wrong", {}, "returned int"),
        ("MODULE:number", {}, "neither a Scaffold nor makes one"),
        ("MODULE:breaks", {}, r"KeyError: 'key' \(scaffolds_of_a_test.py:18\)"),
        ("MODULE:exits", {}, r"SystemExit: 0 \(scaffolds_of_a_test.py:21\)"),
        ("MODULE:", {}, "must be a name, or MODULE:ATTRIBUTE"),
        (":made", {}, "must be a name, or MODULE:ATTRIBUTE"),
        ("a:b:c", {}, "must be a name, or MODULE:ATTRIBUTE"),
        ("builtins:print", {"x": "1"}, "'builtins:print'"),
    ],
)
def test_what_is_none(module: str, name: str, options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find(name.replace("MODULE", module), options)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 / 0", r"ZeroDivisionError: division by zero \(broken_of_a_test.py:2\)"),
        ("import no_such_thing", r"No module named 'no_such_thing' \(broken_of_a_test.py:2\)"),
        ("def (", r"SyntaxError: .*broken_of_a_test.py, line 2"),
        ("raise SystemExit(0)", r"SystemExit: 0 \(broken_of_a_test.py:2\)"),
    ],
)
def test_a_module_that_breaks_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    (tmp_path / "broken_of_a_test.py").write_text(f"\n{text}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.delitem(sys.modules, "broken_of_a_test", raising=False)
    with pytest.raises(UsageError, match=f"cannot be imported: .*{says}") as refused:
        find("broken_of_a_test:x", {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("reads_a_list", "its read returned list, and not Loaded"),
        ("reads_nothing", "FILE: there is no conversation in it"),
        ("reads_badly", r"cannot read FILE: KeyError: 'key' \(scaffolds_of_a_test.py:18\)"),
        ("reads_twice", "it read two items with the id 'a'"),
        ("reads_numbers", "the id and the digest of item 7 must be strings"),
        ("reads_no_ids", "an item that it read: 'object' object has no attribute 'id'"),
        ("has_odd_options", "its options must be JSON"),
    ],
)
def test_what_cannot_be_a_run(module: str, name: str, says: str) -> None:
    spec = RunSpec(data="FILE", scaffold=f"{module}:{name}")
    with pytest.raises(UsageError, match=says):
        plan("run", spec, Path("runs"), Attempt())


def test_options_are_compared_as_they_are_written(module: str) -> None:
    planned = plan(
        "run", RunSpec(data="FILE", scaffold=f"{module}:has_options"), Path("r"), Attempt()
    )
    manifest = manifest_of(planned.settings, planned.scaffold, planned.items)
    assert manifest["options"] == {"t": [1, 2], "3": "NaN"}
    check_unchanged("run", from_json(to_json(manifest)), manifest)


def test_plain_lines(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"id": "a", "x": 1}\n{"x": 1, "id": 7}\n')
    one, two = read_plain(str(file)).items
    assert (one.id, two.id, two.fields["x"]) == ("a", "7", 1)
    assert one.digest != two.digest
    file.write_text('{"x": 1}\n{"id": "a"}\n{"id": "a"}\n')
    with pytest.raises(BadLines, match=r"(?s):1: id: is missing.*:3: id 'a' is taken by line 2"):
        read_plain(str(file))
    file.write_text('{"id": "a\\nb"}\n{"id": " "}\n{"id": true}\n')
    with pytest.raises(BadLines, match=r"(?s):1: id: must be one line.*:2: id: must not be empty"):
        read_plain(str(file))


def test_an_ending_holds_what_it_is_given() -> None:
    assert Ended([], "turns", ending="max_steps", score=0.5).failed is None
