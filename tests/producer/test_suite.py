"""Suites as files: what is in them, and what is wrong with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turnmill.errors import BadInput, BadLines, UsageError
from turnmill.spec import Attempt, RunSpec
from turnmill.suite import Suite, read_suite

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_text('{"id": "a", "turns": ["x"]}\n{"id": "b", "turns": ["y"]}\n')
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "nightly.toml"
    path.write_text(text)
    return path


def suite(folder: Path, text: str) -> Suite:
    return read_suite(written(folder, text))


def refused(folder: Path, text: str) -> list[str]:
    """What is wrong, without the file's name."""
    path = written(folder, text)
    with pytest.raises((BadInput, BadLines)) as caught:
        read_suite(path)
    lines = str(caught.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_runs_are_tables_over_the_defaults(folder: Path) -> None:
    found = suite(
        folder,
        """
        [defaults]
        data = "in.jsonl"
        sampling = { temperature = 1.0, max_tokens = 512 }
        max_failures = 3
        set = { depth = 2, loud = true }

        [t10_32k]
        sampling = { max_tokens = 32768 }
        set = { depth = 3 }

        [plain]
        run = "plain-2"
        data = "elsewhere"
        epochs = 4
        max_failures = "10%"
        concurrency = 8
        keep = "7d"
        engine_arguments = ["--context", "80"]
        """,
    )
    assert found.name == "nightly"
    long, plain = found.runs
    assert (long.table, long.name) == ("t10_32k", "nightly-t10_32k")
    assert long.spec.data == str(folder / "in.jsonl")
    assert long.spec.sampling.model_dump(exclude_none=True) == {
        "temperature": 1.0,
        "max_tokens": 32768,
    }
    assert long.spec.set == {"depth": "3", "loud": "true"}
    assert (str(long.spec.max_failures), long.spec.concurrency) == ("3", None)
    assert plain.name == "plain-2"
    assert plain.spec.data == "elsewhere"  # no path there: the scaffold's own word
    assert (str(plain.spec.max_failures), plain.spec.concurrency) == ("10%", 8)
    assert (plain.spec.keep, plain.spec.epochs) == (7 * 86400, 4)
    assert plain.spec.worker.line()[-3:] == ["--", "--context", "80"]


def test_plans_are_of_the_named_runs_in_the_files_order(folder: Path) -> None:
    found = suite(folder, '[defaults]\ndata = "in.jsonl"\nlimit = 1\n[a]\n[b]\nshuffle = 5\n[c]\n')
    attempt = Attempt(again=["failed"], extend=True)
    plans = found.plan(["c", "a"], Path("out"), attempt)
    assert [table for table, _ in plans] == ["a", "c"]
    (_, one), _ = plans
    assert (one.name, one.folder) == ("nightly-a", Path("out/nightly-a"))
    assert (one.settings.again, one.settings.extend) == (frozenset(["failed"]), True)
    assert [item.id for item in one.items] == ["a"]
    assert len(found.plan([], Path("out"), attempt)) == 3
    with pytest.raises(UsageError, match=r"there is no \[d\]; there are \[a\], \[b\], \[c\]"):
        found.plan(["a", "d"], Path("out"), attempt)


def test_all_that_is_wrong_is_said_with_table_and_key(folder: Path) -> None:
    assert refused(
        folder,
        """
        limit = 3

        [defaults]
        epochs = 0
        run = "all"

        [one]
        data = "in.jsonl"
        temprature = 1
        concurrency = "many"
        sampling = { temperature = -1, max_token = 4 }

        [two]
        data = 3
        epochs = 1
        max_failures = "200%"
        keep = "soon"
        engine_arguments = ["--context", 80]

        [three]
        """,
    ) == [
        "limit: must be a table; what all runs share is in [defaults]",
        "[defaults] run: is the name of one run",
        "[one] sampling.temperature: Input should be greater than or equal to 0",
        "[one] sampling.max_token: unknown key, did you mean max_tokens?",
        "[defaults] epochs: Input should be greater than or equal to 1",
        "[one] concurrency 'many': auto, or a number of conversations",
        "[one] temprature: unknown key",
        "[two] data: must be a string",
        "[two] max-failures '200%': a number of conversations, or a share like 5%",
        "[two] keep: duration 'soon': a number above 0 and s, m, h or d, for example 7d",
        "[two] engine_arguments.1: must be a string",
        "[three] data: is missing",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no run in it"),
        ("[a\n", "not TOML: "),
        ('[a]\ndata = "x"\n[a]\n', "not TOML: "),
        ('[a]\ndata = "x"\nepochs = true\n', "[a] epochs: Input should be a valid integer"),
        ('[a]\ndata = "x"\nrun = "a/b"\n', "[a] run 'a/b': "),
        ('["a b"]\ndata = "x"\n', "[a b] run 'nightly-a b': "),
        ('[a]\ndata="x"\nrun="r"\n[b]\ndata="x"\nrun="r"\n', "[b] run: 'r' is the run of [a] alr"),
        ("[defaults]\nsampling = 3\n[a]\ndata = 'x'\n", "[defaults] sampling: "),
        ("[a]\ndata = 'x'\nsampling = {logit_bias = {5 = nan}}\n", "[a] sampling.logit_bias.5: "),
    ],
)
def test_one_thing_wrong(folder: Path, text: str, says: str) -> None:
    (line,) = refused(folder, text)
    assert line.startswith(says)


def test_inputs_are_read_before_anything_is_asked(folder: Path) -> None:
    (folder / "bad.jsonl").write_text("{}\n")
    found = suite(
        folder,
        """
        [good]
        data = "in.jsonl"
        [gone]
        data = "gone.jsonl"
        [bad]
        data = "bad.jsonl"
        [odd]
        data = "in.jsonl"
        scaffold = "unknown"
        [set]
        data = "in.jsonl"
        set = { depth = 3 }
        """,
    )
    with pytest.raises(BadLines) as caught:
        found.plan([], Path("out"), Attempt())
    said = str(caught.value)
    for what in (
        "[gone] gone.jsonl: cannot be read: No such file or directory",
        f"[bad] {folder}/bad.jsonl:1: id: is missing",
        "[odd] scaffold 'unknown' is unknown",
        "[set] scaffold 'multi_turn_chat' takes no options",
    ):
        assert f"{folder}/nightly.toml: {what}" in said
    assert "[good]" not in said
    assert len(found.plan(["good"], Path("out"), Attempt())) == 1


def test_the_suite_of_the_documents_is_one(folder: Path) -> None:
    text = (ROOT / "docs" / "suites.md").read_text()
    example = text.split("```toml suite\n")[1].split("```")[0]
    found = suite(folder, example)
    assert [run.name for run in found.runs] == [
        "nightly-greedy",
        "nightly-t10_32k",
        "second-opinion",
    ]
    table = text.split("## Keys")[1].split("\n\n")[1]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {*RunSpec.model_fields, "run"}
    said = text.split("```text\nturnmill: ")[1].split("```")[0].splitlines()
    wrong = example.replace("max_tokens = 32768", "max_token = 1", 1)
    wrong = wrong.replace("[greedy]", '[greedy]\nmax_failures = "200%"')
    assert sorted(f"nightly.toml: {line}" for line in refused(folder, wrong)) == sorted(said)


def test_the_example_is_a_suite() -> None:
    plans = read_suite(ROOT / "examples" / "suite.toml").plan([], Path("out"), Attempt())
    assert [table for table, _ in plans] == ["greedy", "t07", "t10"]
