"""Multi-IF's rows, in CSV and in JSON lines."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from turnmill.conversations import read_conversations
from turnmill.errors import BadInput, BadLines

COLUMNS = [
    "turns",
    "responses",
    *(
        f"turn_{turn}_{part}"
        for turn in (1, 2, 3)
        for part in ("prompt", "instruction_id_list", "kwargs")
    ),
    "key",
    "turn_index",
    "language",
]


def prompt(text: str, role: str = "user") -> str:
    return json.dumps({"role": role, "content": text})


def row(key: str, *turns: str) -> dict[str, str]:
    prompts = {f"turn_{number}_prompt": turn for number, turn in enumerate(turns, start=1)}
    lists = {f"turn_{n}_instruction_id_list": '["punctuation:no_comma"]' for n in (1, 2, 3)}
    return dict.fromkeys(COLUMNS, "") | lists | prompts | {"key": key, "language": "English"}


def as_csv(path: Path, rows: list[dict[str, str]]) -> Path:
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_lines(path: Path, rows: list[dict[str, str]]) -> Path:
    """As exported from the data set: what is empty is null."""
    objects: list[dict[str, Any]] = [{k: v or None for k, v in row.items()} for row in rows]
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return path


ROWS = [
    row(
        "1019:16:en", prompt('Write, with "quotes"\nand lines.'), prompt("No commas."), prompt("!")
    ),
    row("1020:16:zh", prompt("写一首诗。"), prompt("短一点。")),
    row("1021:1:hi", prompt("एक कविता")),
]


@pytest.mark.parametrize(("write", "name"), [(as_csv, "m.CSV"), (as_lines, "m.jsonl")])
def test_rows_are_conversations(tmp_path: Path, write: Any, name: str) -> None:
    found = read_conversations(write(tmp_path / name, ROWS)).items
    assert [(one.id, [turn.content for turn in one.turns]) for one in found] == [
        ("1019:16:en", ['Write, with "quotes"\nand lines.', "No commas.", "!"]),
        ("1020:16:zh", ["写一首诗。", "短一点。"]),
        ("1021:1:hi", ["एक कविता"]),
    ]
    assert {one.system for one in found} == {None}


def test_both_formats_are_the_same_run(tmp_path: Path) -> None:
    table = read_conversations(as_csv(tmp_path / "m.csv", ROWS)).items
    lines = read_conversations(as_lines(tmp_path / "m.jsonl", ROWS)).items
    assert [one.digest for one in table] == [one.digest for one in lines]


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    long = "word " * 100_000
    (found,) = read_conversations(as_csv(tmp_path / "m.csv", [row("a", prompt(long))])).items
    assert found.turns[0].content == long


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (row("1019:16:en", prompt("x")), "id '1019:16:en' is taken by line 2"),
        (row("", prompt("x")), "key: must not be empty"),
        (row("b"), "turn_1_prompt: is empty"),
        (row("b", "Write."), "turn_1_prompt: not JSON: Expecting value, column 1"),
        (row("b", prompt("x"), '["x"]'), "turn_2_prompt: must be a JSON object"),
        (row("b", prompt("x", "system")), 'turn_1_prompt: must have the role "user"'),
        (row("b", '{"role": "user"}'), "turn_1_prompt: content must be a string"),
        (row("b", prompt("x"), "", prompt("y")), "turn_3_prompt: comes after turn_2_prompt, which"),
        (row("b", prompt("\ud800")), "turn_1_prompt: content: half a surrogate pair"),
    ],
)
def test_bad_rows_are_named_by_their_first_line(
    tmp_path: Path, bad: dict[str, str], says: str
) -> None:
    two_lines = row("two", json.dumps({"role": "user", "content": "x"}, indent=0))
    path = as_csv(tmp_path / "m.csv", [ROWS[0], two_lines, bad, ROWS[1]])
    with pytest.raises(BadLines) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}:7: {says}")
    skipped = read_conversations(path, skip_bad=True)
    assert [one.id for one in skipped.items] == ["1019:16:en", "two", "1020:16:zh"]
    assert [one.line for one in skipped.bad] == [7]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ":1: the header has no key, turn_1_prompt"),
        ("id,turns\na,b\n", ":1: the header has no key, turn_1_prompt"),
        ("key,turn_1_prompt,key\n", ":1: the column 'key' is there twice"),
        ("key,turn_1_prompt\n", ": there is no conversation in it"),
        ("key,turn_1_prompt\na\n", ":2: has 1 cells, and the header 2"),
        ('key,turn_1_prompt\na,"b"c\n', ":2: not CSV: "),
        ('key,turn_1_prompt\n\n\na,"b\n', ":4: not CSV: unexpected end of data"),
        ("key,turn_1_prompt\na,\xff\n", ":2: not UTF-8"),
    ],
)
def test_what_is_no_table(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises((BadInput, BadLines)) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}{says}")


def test_rows_behind_a_broken_quote_are_not_lost_unnoticed(tmp_path: Path) -> None:
    path = as_csv(tmp_path / "m.csv", ROWS[:1])
    path.write_text(path.read_text() + 'b,"open\nc,d\n')
    with pytest.raises(BadInput, match=r":3: not CSV: "):
        read_conversations(path, skip_bad=True)


def test_a_row_of_json_without_a_key(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"turn_1_prompt": prompt("x")}))
    with pytest.raises(BadLines, match=r":1: key: is missing"):
        read_conversations(path)
