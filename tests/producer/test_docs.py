"""The documents say what is true: their examples are read by the code that they are about."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import redis
from tests.processes import SimWorker, ValkeyServer

from turnmill import BadLines, Client, Message, Sampling, Turn
from turnmill.cli import cli
from turnmill.conversations import Conversation, read_conversations
from turnmill.keys import Keys
from turnmill.rehearsal import Outlook
from turnmill.reply import Failure, Reply, Trace
from turnmill.results import ConversationResult, Report
from turnmill.scaffolds.vanillux import vanillux
from turnmill.scaffolds.vanillux.agent import Ending
from turnmill.scaffolds.vanillux.task import Task, read_tasks
from turnmill.scripts import CANCEL, ENQUEUE, FORGET, RESTORE, SETTLE, TEND
from turnmill.settings import Farm
from turnmill.store import BenchedWorker, WorkerInfo
from turnmill.wire import decode
from turnmill_worker.cli import worker as worker_command
from turnmill_worker.drill_cli import drill as drill_command
from turnmill_worker.engines import load
from turnmill_worker.engines.base import EngineSettings
from turnmill_worker.scripts import ALL

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@dataclass(frozen=True)
class Block:
    """What is fenced in a document. `kind`: what stands behind the language."""

    document: str
    language: str
    kind: str
    text: str


def blocks(document: Path) -> Iterator[Block]:
    fenced = re.compile(r"^( *)```(\w+) ?(\w[\w-]*)?\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    for _, language, kind, text in fenced.findall(document.read_text()):
        yield Block(document.name, language, kind, text)


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


def examples(kind: str, document: str | None = None) -> list[str]:
    found = [b.text for b in BLOCKS if b.kind == kind and document in (None, b.document)]
    assert found, f"no example of {kind}"
    return found


def the_example(kind: str, document: str) -> str:
    (found,) = examples(kind, document)
    return found


def prose(document: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


# Links


def anchors(document: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", prose(document))
    for link in links:
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_document_is_linked_from_the_readme() -> None:
    links = set(re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text()))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= links


# Formats


def test_conversation_lines_are_conversations(tmp_path: Path) -> None:
    lines = examples("conversation") + examples("mt-bench")
    file = tmp_path / "input.jsonl"
    file.write_text("".join(lines))
    ids = [conversation.id for conversation in read_conversations(file).items]
    assert ids == ["ferry", "7", "81"]


def test_the_rows_of_multi_if_are_conversations(tmp_path: Path) -> None:
    file = tmp_path / "input.csv"
    file.write_text(the_example("multi-if", "formats.md"))
    (conversation,) = read_conversations(file).items
    assert conversation.id == "1019:16:en"
    assert [turn.content for turn in conversation.turns] == [
        "Write a poem, without commas.",
        "Shorter.",
    ]


def test_all_sampling_fields_are_named() -> None:
    text = (ROOT / "docs" / "formats.md").read_text().split("Sampling fields, by")[1]
    assert re.findall(r"`(\w+)`", text.split("One that is not set")[0]) == list(
        Sampling.model_fields
    )


def results() -> list[ConversationResult]:
    lines = the_example("replies", "formats.md").splitlines()
    return [ConversationResult.model_validate_json(line) for line in lines]


def test_reply_lines_are_written_like_this() -> None:
    lines = the_example("replies", "formats.md").splitlines()
    assert [result.model_dump_json() for result in results()] == lines


def test_the_report_is_that_of_the_replies() -> None:
    example = json.loads(the_example("report", "formats.md"))
    report = Report.model_validate(example)
    again = Report.of(
        results(), run="ferry", seconds=report.seconds, engines=report.engines, asked=report.asked
    )
    assert json.loads(again.model_dump_json()) == example


def test_an_outlook_has_these_keys() -> None:
    example = json.loads(the_example("outlook", "formats.md"))
    assert json.loads(Outlook.model_validate(example).model_dump_json()) == example
    assert list(example) == list(Outlook.model_fields)


def test_the_hashes_of_the_replies_are_right() -> None:
    """Also that a shared turn of a run is what a service would ask."""
    result = results()[0]
    conversation = Conversation.model_validate_json(examples("conversation")[0])
    assert conversation.sampling is not None
    asked = [
        Turn(model="sim", messages=result.messages[:known], sampling=conversation.sampling)
        for known in (2, 4)
    ]
    assert [turn.hash for turn in asked] == [turn.hash for turn in result.turns]


def test_bad_lines_are_refused_in_these_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ['{"id": "a", "turns": ["x"]}', '{"id": "a", "turns": "y"}', '{"id":"b","turn":["z"]}']
    Path("bad.jsonl").write_text("\n".join(lines))
    (said,) = [b.text for b in BLOCKS if b.text.startswith("turnmill: bad.jsonl")]
    with pytest.raises(BadLines) as caught:
        read_conversations("bad.jsonl")
    assert f"turnmill: {caught.value}\n" == said


# The hash


def test_the_golden_example() -> None:
    turn = Turn.model_validate_json(the_example("turn", "hash.md"))
    canonical = the_example("canonical", "hash.md").strip().encode()
    golden = the_example("hash", "hash.md").strip()
    assert turn.canonical.hashed == canonical
    assert hashlib.sha256(canonical).hexdigest() == golden
    assert turn.hash == golden


def test_the_shortest_turn() -> None:
    text = (ROOT / "docs" / "hash.md").read_text()
    ((asked, body),) = re.findall(r"shortest turn there is, `(.*?)`, has the\s+body `(.*?)`", text)
    assert Turn.model_validate_json(asked).body.decode() == body


def test_every_field_of_a_turn_is_in_the_table() -> None:
    text = (ROOT / "docs" / "hash.md").read_text()
    table = text.split("## What is in it")[1].split("## What is not")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted([*Turn.model_fields, "v"])


def asked(**fields: Any) -> str:
    plain = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    return Turn.model_validate(plain | fields).hash


def schema(**keys: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": keys}}]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"sampling": {}, "tools": [], "sample": 0, "revision": None}),
        ({}, {"sampling": {"stop": [], "top_p": None}}),
        ({"sampling": {"temperature": 1}}, {"sampling": {"temperature": 1.0}}),
        ({"sampling": {"stop": "END"}}, {"sampling": {"stop": ["END"]}}),
        ({"tools": [{"function": {}}]}, {"tools": [{"type": "function", "function": {}}]}),
        (schema(n=10**20), schema(n=1e20)),
    ],
)
def test_these_are_one_turn(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert asked(**one) == asked(**other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"sample": 1}),
        ({}, {"sampling": {"temperature": 1}}),
        (schema(), schema(default=None)),
        (schema(n=2**63), schema(n=2**63 + 1)),
        (
            {"messages": [{"role": "user", "content": "Hi"}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]},
        ),
        (
            {"messages": [{"role": "assistant", "content": "Hi"}]},
            {"messages": [{"role": "assistant", "content": "Hi", "tool_calls": []}]},
        ),
    ],
)
def test_these_are_two_turns(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert asked(**one) != asked(**other)


# The protocol


@pytest.mark.parametrize(
    ("kind", "model"), [("reply", Reply), ("failure", Failure), ("trace", Trace)]
)
def test_records_can_be_read(kind: str, model: type) -> None:
    decode(model, the_example(kind, "protocol.md").strip().encode())


def test_the_body_of_the_protocol_is_that_of_its_reply_line() -> None:
    body = the_example("turn", "protocol.md").strip().encode()
    assert hashlib.sha256(body).hexdigest() == results()[0].turns[0].hash


def test_a_worker_says_this_of_itself() -> None:
    text = the_example("worker", "protocol.md").strip()
    assert WorkerInfo.model_validate_json(text).model_dump_json() == text


def test_every_key_is_in_the_tables() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    rows = re.findall(r"^\| `([NQ])` `([\w:]+)` \|", text, re.MULTILINE)
    documented = {(prefix, re.sub(r"[A-Z]+", "*", name)) for prefix, name in rows}

    of_producers = (ENQUEUE, CANCEL, FORGET, RESTORE, SETTLE, TEND)
    scripts = "\n".join(s.text for s in (*of_producers, *ALL))
    used = set()
    for prefix, name, goes_on in re.findall(r"\b([NQ]) \.\. '([\w:]+)'( \.\.)?", scripts):
        used.add((prefix, re.sub(r":.*", "", name)) if goes_on else (prefix, name))
    short = {(prefix, re.sub(r":.*", "", name)) for prefix, name in documented}
    assert used <= short, used - short

    keys = Keys("n")
    for name, member in vars(Keys).items():
        if name.startswith("_") or name in ("namespace", "prefix", "queue", "classes"):
            continue
        if isinstance(member, property):
            made = member.fget(keys)  # type: ignore[misc]
        else:
            count = member.__code__.co_argcount - 1
            made = getattr(keys, name)(*["*"] * count)
        if made.startswith("n:q:*:"):
            entry = ("Q", made.removeprefix("n:q:*:"))
        else:
            entry = ("N", made.removeprefix("n:"))
        assert entry in documented, entry


def test_a_benched_worker_says_this_of_itself() -> None:
    text = the_example("benched", "protocol.md").strip()
    assert BenchedWorker.model_validate_json(text).model_dump_json() == text


async def test_the_client_of_the_protocol_gets_its_reply(
    farm: Farm, worker: Callable[..., SimWorker]
) -> None:
    worker("--served-name", "m")
    code = compile(the_example("client", "protocol.md"), "protocol.md", "exec")
    known: dict[str, Any] = {"url": farm.url, "namespace": farm.namespace, "model": "m"}
    await asyncio.to_thread(exec, code, known)
    reply = decode(Reply, known["reply"])
    assert reply.message.content == "Hello"
    # The library knows this turn by the same name.
    turn = Turn(
        model="m",
        messages=[Message(role="user", content="Hello")],
        sampling=Sampling(temperature=0, max_tokens=16),
    )
    assert turn.hash == known["hash"]
    async with Client(farm.url, namespace=farm.namespace) as client:
        state, ending = await client.ask_stating(turn)
    assert (state, ending) == ("answered", reply)


# Operations


async def test_the_access_rule_is_enough_and_no_more(
    own_valkey: Callable[..., ValkeyServer], worker: Callable[..., SimWorker]
) -> None:
    server = own_valkey()
    rule = shlex.split(the_example("acl", "operations.md"))[2:]
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "turnmill", *rule)
    url = f"unix://turnmill:PASSWORD@{server.socket}"
    worker("--served-name", "m", farm=Farm(url))
    turn = Turn(model="m", messages=[Message(role="user", content="Hello")])
    async with Client(url) as client:
        ending = await client.ask(turn)
        assert isinstance(ending, Reply)
        assert await client.trace(turn.hash)
        assert (await client.status()).workers
    with redis.Redis.from_url(url) as limited:
        for forbidden in (("SET", "other:x", "1"), ("FLUSHALL",), ("CONFIG", "GET", "*")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                limited.execute_command(*forbidden)


def test_the_settings_for_redis_are_settings(own_valkey: Callable[..., ValkeyServer]) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    (block,) = re.findall(r"```text\n(appendonly.*?)```", text, re.DOTALL)
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    with redis.Redis.from_url(own_valkey(**{name: value for name, value in lines}).url) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


# Commands


def typed() -> list[str]:
    """Every turnmill command line in a block, without what a shell or systemd puts before it."""
    lines = [
        line.partition(" #")[0].strip()
        for block in BLOCKS
        if block.language in ("sh", "ini")
        for line in block.text.splitlines()
    ]
    bare = [re.sub(r"^(ExecStart=\S*/|(\w+=\S+ )+)", "", line) for line in lines]
    return [line for line in bare if line.startswith("turnmill ")]


def mentioned() -> list[str]:
    """Those in running text, which may leave out what is plain."""
    texts = "\n".join(prose(document) for document in DOCUMENTS)
    return sorted(set(re.findall(r"`(turnmill [a-z][^`]+)`", texts)))


ELSEWHERE = {"worker": worker_command, "drill": drill_command}
"""Commands whose options the producer's half only passes on."""


def understand(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = ELSEWHERE.get(name) or cli.commands[name]
    command.make_context(name, arguments)


@pytest.mark.parametrize("line", typed())
def test_typed_commands_are_understood(line: str) -> None:
    understand(line)


@pytest.mark.parametrize("line", mentioned())
def test_mentioned_commands_are_understood(line: str) -> None:
    with contextlib.suppress(click.exceptions.Exit, click.MissingParameter):
        understand(line)


def options_of(command: click.Command) -> set[str]:
    own = {option for parameter in command.params for option in parameter.opts}
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return own.union(*(options_of(one) for one in below))


def arguments_of(engine: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        load(engine)(EngineSettings(arguments=("--help",)))
    return set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}


def test_options_in_the_texts_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    known = {"--help", "--version"}.union(
        *(options_of(command) for command in (*ELSEWHERE.values(), *cli.commands.values())),
        *(arguments_of(engine, capsys) for engine in ("sim", "local", "openai")),
    )
    sglang = {
        "--allow-auto-truncate",
        "--dp-size",
        "--enable-deterministic-inference",
        "--lora-paths",
        "--max-loras-per-batch",
        "--mem-fraction-static",
        "--node-rank",
        "--reasoning-parser",
        "--skip-tokenizer-init",
        "--tool-call-parser",
        "--tp-size",
    }
    vllm = {
        "--enable-auto-tool-choice",
        "--data-parallel-size",
        "--enable-lora",
        "--grpc",
        "--headless",
        "--lora-modules",
        "--max-loras",
        "--max-num-seqs",
        "--scheduling-policy",
        "--skip-tokenizer-init",
        "--reasoning-parser",
        "--tool-call-parser",
    }
    others = {"--scale", "--detach", "--array"}
    for document in DOCUMENTS:
        if document.parent.name == "harnesses":  # whose options are those of other programs
            continue
        inline = " ".join(re.findall(r"`([^`]+)`", prose(document)))
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", inline))
        unknown = named - known - sglang - vllm - others
        assert not unknown, (document.name, unknown)


@pytest.mark.parametrize("engine", ["sim", "local", "openai"])
def test_the_arguments_of_an_engine_are_documented(
    engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xllamacpp")
    section = (ROOT / "docs" / "engines.md").read_text().split(f"\n## {engine}\n")[1]
    table = re.findall(r"^\| (`--.*?) \|", section.split("\n## ")[0], re.MULTILINE)
    documented = set(re.findall(r"--[a-z][a-z-]+", " ".join(table)))
    assert documented == arguments_of(engine, capsys)


def test_tasks_of_vanillux_are_tasks(tmp_path: Path) -> None:
    line, toml = examples("vanillux-task", "scaffolds.md")
    (tmp_path / "tasks.jsonl").write_text(line)
    (task,) = read_tasks(str(tmp_path / "tasks.jsonl")).items
    assert (task.id, task.check) == ("sorted", "printf 'a\\nb\\n' | cmp - sorted.txt")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "task.toml").write_text(toml)
    (task,) = read_tasks(str(tmp_path)).items
    assert (task.id, task.check_seconds) == ("server", 60)


def test_tables_of_vanillux_are_whole() -> None:
    section = (ROOT / "docs" / "scaffolds.md").read_text().split("\n## vanillux\n")[1]

    def rows(head: str) -> list[str]:
        table = section.split(f"{head}\n")[1].split("\n\n")[0]
        cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
        return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]

    assert {*rows("| key | |"), "digest"} == set(Task.model_fields)
    options = inspect.signature(vanillux).parameters
    assert {*rows("| `--set` | unless set | |"), "unsafe_local"} == set(options)
    assert rows("| ending | | outcome |") == list(get_args(Ending))


def test_make_targets_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    named = [name for d in DOCUMENTS for name in re.findall(r"`make ([a-z-]+)`", prose(d))]
    named += [
        name
        for block in BLOCKS
        if block.language == "sh"
        for name in re.findall(r"^make ([a-z-]+)", block.text, re.MULTILINE)
    ]
    assert {"demo", "test"} <= set(named) <= set(phony.split())


@pytest.mark.parametrize("document", ["README.md", "library.md"])
async def test_the_examples_of_the_library_are_answered(
    document: str,
    farm: Farm,
    worker: Callable[..., SimWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker("--served-name", "Qwen/Qwen3-8B")
    monkeypatch.setenv("TURNMILL_NAMESPACE", farm.namespace)
    (text,) = [
        block.text
        for block in BLOCKS
        if (block.document, block.language, block.kind) == (document, "python", "")
    ]
    known: dict[str, Any] = {}
    exec(text.replace("redis://127.0.0.1:6379", farm.url), known)
    assert await known["answer"]("What is a tide?") == "What is a tide?"


async def test_the_example_of_streaming_reads_the_answer(
    farm: Farm, worker: Callable[..., SimWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    worker(sim=("--tokens-per-second", "50"))
    known: dict[str, Any] = {}
    exec(the_example("stream", "library.md"), known)
    said = " ".join(f"word {number}" for number in range(30))
    turn = Turn(model="sim", messages=[Message(role="user", content=said)])
    async with Client(farm.url, namespace=farm.namespace) as client:
        await known["read"](client, turn)
        assert capsys.readouterr().out == f"{said}\n"
        await known["read"](client, turn)  # from the store: no pieces
    assert capsys.readouterr().out == f"{said}\n"


async def test_a_client_of_arq_gets_its_reply(farm: Farm, worker: Callable[..., SimWorker]) -> None:
    worker()
    text = the_example("arq", "library.md").replace("turnmill:q:sim", f"{farm.namespace}:q:sim")
    known: dict[str, Any] = {"url": farm.url}
    body = "".join(f"    {line}\n" for line in text.splitlines())
    exec(f"async def ask(url):\n{body}    await pool.aclose()\n    return reply\n", known)
    reply = await known["ask"](farm.url)
    assert reply["message"]["content"] == "Hello"
