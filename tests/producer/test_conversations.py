"""Input files: what is taken, and how what is not is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from turnmill.conversations import Conversation, read_conversations
from turnmill.errors import BadInput, BadLines, UsageError
from turnmill.lines import MAX_DEPTH
from turnmill.turn import Message, Sampling

DIGEST = "9c80eb4557c3dcd4939e380208c8bc0e5e0f6e4468181f7dcbb93dffd605a7df"
GOOD = {"id": "a", "turns": ["hello"]}


def write(path: Path, *lines: Any) -> Path:
    """A file of these lines; what is no bytes or string is written as JSON."""
    raw = [line if isinstance(line, bytes | str) else json.dumps(line) for line in lines]
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else r.encode() for r in raw) + b"\n")
    return path


def problem(path: Path) -> str:
    """What is said about the only bad line of a file, without FILE:LINE."""
    with pytest.raises(BadLines) as caught:
        read_conversations(path)
    (bad,) = caught.value.bad
    return bad.what


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


def test_a_line_with_everything(file: Path) -> None:
    parts = [{"type": "text", "text": "und jetzt?"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x-ours": None}}}
    write(
        file,
        {
            "id": "full",
            "system": "Sei kurz.",
            "turns": ["hallo", parts, {"role": "user", "content": "ja", "name": "Eva"}],
            "sampling": {"temperature": 0, "stop": "x"},
            "tools": [tool],
        },
    )
    (conversation,) = read_conversations(file).items
    assert conversation.system == "Sei kurz."
    assert [turn.content for turn in conversation.turns] == ["hallo", parts, "ja"]
    assert {turn.role for turn in conversation.turns} == {"user"}
    assert conversation.turns[2].name == "Eva"
    assert conversation.sampling == Sampling(temperature=0, stop=["x"])
    assert conversation.tools is not None
    assert conversation.tools[0].model_dump(exclude_none=True) == tool


def test_mt_bench_lines_are_taken_as_they_are(file: Path) -> None:
    write(
        file,
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        {"question_id": 111, "category": "math", "turns": ["2+2?"], "reference": ["4"]},
    )
    assert [c.id for c in read_conversations(file).items] == ["81", "111"]


def test_an_integer_id_becomes_a_string(file: Path) -> None:
    (conversation,) = read_conversations(write(file, {"id": 7, "turns": ["x"]})).items
    assert conversation.id == "7"


def test_bom_crlf_blank_lines_and_no_last_newline(file: Path) -> None:
    file.write_bytes(
        b'\xef\xbb\xbf{"id":"a","turns":["x"]}\r\n\r\n   \n{"id":"b","turns":["\xc3\xbc"]}'
    )
    assert [c.id for c in read_conversations(file).items] == ["a", "b"]


def test_a_very_long_line(file: Path) -> None:
    text = "long " * 1_000_000
    (conversation,) = read_conversations(write(file, {"id": "a", "turns": [text]})).items
    assert conversation.turns[0].content == text


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("nope", "not JSON: Expecting value, column 1"),
        ('{"id": "a\tb"}', "not JSON: Invalid control character, column 10"),
        ('{"id": "a", "turns": ["x"]', "not JSON: Expecting ',' delimiter, column 27"),
        ([1], "must be a JSON object"),
        ({"id": "a"}, "turns: is missing"),
        ({"turns": ["x"]}, "id: is missing"),
        ({"id": "a", "turns": "x"}, "turns: must be a list"),
        ({"id": "a", "turns": []}, "turns: must have at least one"),
        (
            {"id": "a", "turns": ["x", 3]},
            "turns.1: must be a string, a list of content parts or a user message",
        ),
        (
            {"id": "a", "turns": [{"role": "system", "content": "x"}]},
            'turns.0: a message must have the role "user"',
        ),
        (
            {"id": "a", "turns": [{"role": "user"}]},
            "turns.0: content must be a string or a list of parts",
        ),
        (
            {"id": "a", "turns": [["x"]]},
            'turns.0: a content part must be an object with a "type"',
        ),
        ({"id": "", "turns": ["x"]}, "id: must not be empty"),
        ({"id": True, "turns": ["x"]}, "id: must be a string or an integer"),
        (
            {"id": "a\nb", "turns": ["x"]},
            "id: must be one line, without control characters",
        ),
        ({"question_id": None, "turns": ["x"]}, "question_id: must be a string or an integer"),
        ({"question_id": 1, "id": 1, "turns": ["x"]}, "has both id and question_id"),
        ({**GOOD, "system": ["x"]}, "system: must be a string"),
        ({**GOOD, "sampilng": {}}, "sampilng: unknown key, did you mean sampling?"),
        ({**GOOD, "reference": []}, "reference: unknown key"),
        ({**GOOD, "\x1b[31m": 1}, "\\x1b[31m: unknown key"),
        (
            {**GOOD, "sampling": {"temprature": 1}},
            "sampling.temprature: unknown key, did you mean temperature?",
        ),
        (
            {**GOOD, "sampling": {"top_p": 7}},
            "sampling.top_p: Input should be less than or equal to 1",
        ),
        (
            '{"id": "a", "turns": ["x"], "sampling": {"temperature": NaN}}',
            "sampling.temperature: must be a finite number",
        ),
        (
            '{"id": "a", "turns": ["x"], "tools": [{"big": 1e999}]}',
            "tools.0.big: must be a finite number",
        ),
        ('{"id": "a", "turns": ["\\ud83d"]}', "turns.0: half a surrogate pair"),
        ('{"id": "a", "id": "b", "turns": ["x"]}', "the key 'id' is there twice"),
        (b'{"id": "\xfc", "turns": ["x"]}', "not UTF-8: byte 9 of the line"),
        ("[" * 100_000, f"nested deeper than {MAX_DEPTH}"),
        (
            '{"id": "a", "turns": ["x"], "tools": %s}' % ("[" * 200 + "]" * 200),
            f"nested deeper than {MAX_DEPTH}",
        ),
        (
            '{"id": "a", "turns": ["x"], "tools": [{"n": %s}]}' % ("9" * 5000),
            "an integer of 5000 digits is too long",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_said(file: Path, line: Any, what: str) -> None:
    assert problem(write(file, line)) == what


def test_many_problems_of_one_line_are_cut_short(file: Path) -> None:
    what = problem(write(file, {**GOOD, **{f"key{n}": n for n in range(1000)}}))
    assert what.endswith("; and 997 more")


def test_very_many_problems_of_one_line_are_counted(file: Path) -> None:
    """Each costs a kilobyte to explain."""
    assert problem(write(file, {"id": "a", "turns": [1] * 2000})) == "2000 values are wrong"


def test_one_of_very_many_keys_twice(file: Path) -> None:
    """To count each key by going through all of them takes minutes."""
    keys = ",".join(f'"k{number}":0' for number in range(100_000))
    file.write_text(f'{{{keys},"k99999":1}}\n')
    with pytest.raises(BadLines, match="the key 'k99999' is there twice"):
        read_conversations(file)


def test_a_taken_id_names_the_first_line(file: Path) -> None:
    write(file, {"id": "1", "turns": ["x"]}, GOOD, {"id": 1, "turns": ["y"]})
    with pytest.raises(BadLines) as caught:
        read_conversations(file)
    assert str(caught.value) == f"{file}:3: id '1' is taken by line 1"


def test_all_bad_lines_are_found_and_the_first_shown(file: Path) -> None:
    write(file, GOOD, "", *[{"id": "bad"}] * 50)
    with pytest.raises(BadLines) as caught:
        read_conversations(file)
    assert [bad.line for bad in caught.value.bad] == list(range(3, 53))
    shown = str(caught.value).splitlines()
    assert shown[0] == f"{file}:3: turns: is missing"
    assert len(shown) == 21
    assert shown[-1] == "... and 30 more bad lines"


def test_bad_lines_can_be_skipped(file: Path) -> None:
    loaded = read_conversations(write(file, "nope", GOOD, GOOD), skip_bad=True)
    assert [c.id for c in loaded.items] == ["a"]
    assert [str(bad) for bad in loaded.bad] == [
        f"{file}:1: not JSON: Expecting value, column 1",
        f"{file}:3: id 'a' is taken by line 2",
    ]


def test_nothing_but_bad_lines_is_an_error_also_when_they_are_skipped(file: Path) -> None:
    with pytest.raises(BadLines):
        read_conversations(write(file, "nope"), skip_bad=True)


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_an_empty_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_conversations(file)
    assert str(caught.value) == f"{file}: there is no conversation in it"


def test_no_file_and_no_file_but_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read_conversations(tmp_path / "none")
    assert str(caught.value) == f"{tmp_path}/none: cannot be read: No such file or directory"
    with pytest.raises(BadInput, match=r": cannot be read: Is a directory$"):
        read_conversations(tmp_path)


def test_standard_input() -> None:
    code = "from turnmill.conversations import *; print(read_conversations('-'))"
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n{}\n", capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1].endswith(
        "BadLines: <stdin>:2: id: is missing; turns: is missing"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(GOOD), capture_output=True, text=True
    )
    assert "Conversation(id='a'" in done.stdout


def test_bad_lines_are_usage_errors() -> None:
    assert issubclass(BadLines, UsageError)


def test_equal_conversations_have_equal_digests_however_they_are_written() -> None:
    plain = Conversation(id="a", turns=["x"], sampling={"temperature": 1})
    wordy = Conversation(
        id="a",
        system=None,
        turns=[{"content": "x", "role": "user"}],
        sampling=Sampling(temperature=1.0),
        tools=[],
    )
    assert plain == wordy
    assert plain.digest == wordy.digest


def test_digests_are_pinned() -> None:
    """A manifest holds them: a change refuses every run that was begun before it."""
    conversation = Conversation(
        id="a",
        system="s",
        turns=["x", [{"type": "text", "text": "ü"}]],
        sampling={"max_tokens": 3},
        tools=[{"type": "function", "function": {"name": "f", "max": 2**60}}],
    )
    assert conversation.digest == DIGEST


def test_what_differs_has_another_digest() -> None:
    conversations = [
        Conversation(id="a", turns=["x"]),
        Conversation(id="b", turns=["x"]),
        Conversation(id="a", turns=["x", "x"]),
        Conversation(id="a", turns=[[{"type": "text", "text": "x"}]]),
        Conversation(id="a", turns=["x"], system="x"),
        Conversation(id="a", turns=["x"], sampling={"seed": 1}),
        Conversation(id="a", turns=["x"], tools=[{}]),
    ]
    assert len({conversation.digest for conversation in conversations}) == len(conversations)


def test_a_conversation_is_frozen() -> None:
    conversation = Conversation(id="a", turns=[Message(role="user", content="x")])
    with pytest.raises(ValidationError):
        conversation.id = "b"  # type: ignore[misc]


texts = st.text(max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
parts = st.lists(
    st.fixed_dictionaries({"type": texts}, optional={"text": texts, "other": json_values}),
    min_size=1,
    max_size=3,
)
conversations = st.builds(
    Conversation,
    id=st.text(
        st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp", "Zs"]), min_size=1, max_size=10
    ),
    system=st.none() | texts,
    turns=st.lists(
        texts | parts | st.fixed_dictionaries({"role": st.just("user"), "content": texts | parts}),
        min_size=1,
        max_size=3,
    ),
    sampling=st.none()
    | st.builds(
        Sampling,
        temperature=st.none() | st.floats(0, 2),
        max_tokens=st.none() | st.integers(1, 10**6),
        seed=st.none() | st.integers(),
        stop=st.none() | texts | st.lists(texts, max_size=2),
    ),
    tools=st.none()
    | st.lists(
        st.fixed_dictionaries({"function": st.dictionaries(texts, json_values, max_size=3)}),
        max_size=2,
    ),
)


@given(st.lists(conversations, min_size=1, max_size=4, unique_by=lambda c: c.id))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, written: list[Conversation]
) -> None:
    file = tmp_path_factory.getbasetemp() / "round-trip.jsonl"
    write(file, *[conversation.model_dump_json(exclude_none=True) for conversation in written])
    read = read_conversations(file).items
    assert read == written
    assert [c.digest for c in read] == [c.digest for c in written]


@given(st.binary(max_size=60))
def test_any_bytes_are_good_or_bad_input(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    file.write_bytes(b'{"id": "a", "turns": ["x"]}\n' + data)
    loaded = read_conversations(file, skip_bad=True)
    assert loaded.items[0].id == "a"
    assert all("\n" not in str(bad) for bad in loaded.bad)


def test_the_example_file_is_good() -> None:
    example = Path(__file__).parents[2] / "examples" / "conversations.jsonl"
    conversations = read_conversations(example).items
    assert len(conversations) >= 12
    assert {len(conversation.turns) for conversation in conversations} == {3}
