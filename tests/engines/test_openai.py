"""The engine in front of a server: what becomes of all that a server can do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from typing import Any

import pytest
from tests.engines.asking import ask, turn, until
from tests.engines.conftest import AIOHTTP
from tests.engines.scripted_server import CUT, HANG, Misbehaviour, ScriptedServer

from turnmill.errors import UsageError
from turnmill_worker.engines import load, pace, presence
from turnmill_worker.engines.base import (
    Engine,
    EngineAway,
    EngineDied,
    EngineSettings,
    InvalidRequest,
    NoRoom,
    Progress,
    TurnError,
)

pytestmark = pytest.mark.skipif(not AIOHTTP, reason="aiohttp is not installed here")

SECRET = "sk-very-secret"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "call_" + "0a" * 12, "type": "function"}

Start = Callable[..., Engine]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_FIRST", 0.002)
    for variable in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    one = ScriptedServer(speed=2000.0)
    yield one
    one.close()


@pytest.fixture
def start(server: ScriptedServer) -> Iterator[Start]:
    """Starts engines in front of the server: `start("--retries", "2", model="m")`."""
    engines: list[Engine] = []

    def begin(*arguments: str, **settings: Any) -> Engine:
        given = EngineSettings(arguments=(server.url, *arguments), **settings)
        engines.append(load("openai")(given))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def error(words: str, **more: Any) -> dict[str, Any]:
    return {"error": {"message": words, **more}}


# What it says of itself


def test_it_says_whose_server_it_is(server: ScriptedServer, start: Start) -> None:
    engine = start(slots=3)
    identity = engine.identity
    assert (identity.engine, identity.version) == ("openai", "vllm 9.9")
    assert identity.model == engine.served_name == "scripted"
    assert (engine.capacity().slots, engine.capacity().context) == (3, 256)


def test_llama_cpp_says_how_much_it_can_hold(server: ScriptedServer, start: Start) -> None:
    server.card = {"owned_by": "llamacpp", "meta": {"n_ctx_train": 8192}}
    props = {"build_info": "b42", "total_slots": 2, "default_generation_settings": {"n_ctx": 512}}
    server.other["/props"] = (200, props)
    engine = start()
    assert engine.identity.version == "llama.cpp b42"
    assert (engine.capacity().slots, engine.capacity().context) == (2, 512)


@pytest.mark.parametrize("name", ["context_length", "context_window", "max_context_length"])
def test_hosts_name_their_context_in_several_ways(
    server: ScriptedServer, start: Start, name: str
) -> None:
    server.card = {name: 4096}
    engine = start()
    assert (engine.capacity().context, engine.identity.version) == (4096, "unknown")


def test_a_context_that_nobody_says_is_not_known(
    server: ScriptedServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server.card = {}
    assert start().capacity().context == 0
    assert "--context" in caplog.text
    assert start("--context", "1000").capacity().context == 1000


def test_a_path_is_served_by_its_last_part(server: ScriptedServer, start: Start) -> None:
    server.card = {"id": "/models/Qwen3-8B"}
    assert start().served_name == "Qwen3-8B"
    assert start(served_name="other").served_name == "other"


# Its start


def test_the_base_url_may_come_from_the_environment(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{server.port}/")  # /v1 is understood
    engine = load("openai")(EngineSettings())
    engine.close()
    assert server.requests[0].path == "/v1/models"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ((), "no base URL"),
        (("ftp://host/v1",), "is not a base URL"),
        (("127.0.0.1:8000",), "is not a base URL"),
        (("http://127.0.0.1:port/v1",), "base URL"),
        ((f"http://user:{SECRET}@host/v1",), "OPENAI_API_KEY"),
        ((f"https://host/v1?key={SECRET}",), "OPENAI_API_KEY"),
        (("http://host/v1", "--api-key", "x"), "unrecognized arguments"),
        (("http://host/v1", "--silence", "-1"), "--silence"),
    ],
)
def test_wrong_arguments_are_refused(url: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        load("openai")(EngineSettings(arguments=url))
    assert "\n" not in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_model_that_is_not_there_is_named_with_those_that_are(start: Start) -> None:
    with pytest.raises(UsageError, match=r"no model Qwen; it has scripted"):
        start(model="Qwen")


def test_a_server_without_a_list_needs_a_model(server: ScriptedServer, start: Start) -> None:
    server.other["/v1/models"] = (404, {"detail": "Not Found"})
    with pytest.raises(UsageError, match=r"404: Not Found; .*--model"):
        start()
    assert start(model="m").identity.model == "m"


def test_what_is_no_such_server_is_refused(server: ScriptedServer, start: Start) -> None:
    server.other["/v1/models"] = (200, "<html>")
    with pytest.raises(UsageError, match="is the base URL right"):
        start()


@pytest.mark.parametrize("key", ["", "wrong-key"])
def test_a_key_that_is_refused_ends_the_start(
    server: ScriptedServer, start: Start, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    server.key = SECRET
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UsageError, match=r"401: Incorrect API key .*OPENAI_API_KEY") as refused:
        start()
    assert "wrong-key" not in str(refused.value)  # though the server repeats it


async def test_the_key_is_sent_and_never_told(
    server: ScriptedServer,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    server.key = SECRET
    monkeypatch.setenv("OPENAI_API_KEY", f" {SECRET}\n")
    engine, progress = start(), Progress()
    assert (await ask(engine, turn("Say hello"), progress)).message["content"]
    server.misbehave.append(Misbehaviour(400, error(f"no {SECRET} here")))
    with pytest.raises(InvalidRequest, match=r"no \(the key\) here"):
        await ask(engine, turn("Say hello"))
    assert SECRET not in caplog.text + str(progress) + str(engine.identity)


def test_a_server_that_is_not_there_yet_is_waited_for(
    server: ScriptedServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    server.stop()
    threading.Timer(0.3, server.start).start()
    assert start().served_name == "scripted"
    assert f"waiting for {server.url}" in caplog.text


async def test_a_proxy_of_the_environment_is_used_unless_it_is_told_not_to(
    server: ScriptedServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("no_proxy", "NO_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
    server.other["http://far.away/v1/models"] = (200, {"data": [{"id": "m", "context_length": 9}]})
    engine = load("openai")(EngineSettings(arguments=("http://far.away/v1",)))
    engine.close()
    assert server.requests[-1].path == "http://far.away/v1/models"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    start()
    assert all(request.path.startswith("/") for request in server.requests[1:])


# Requests


async def test_a_request_has_what_the_turn_sets_and_nothing_else(
    server: ScriptedServer, start: Start
) -> None:
    engine, progress = start(), Progress()
    await ask(engine, turn("Hello", max_tokens=None, temperature=None), progress)
    body = server.asked[-1].body
    assert body == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert progress.request["endpoint"] == f"{server.url}/chat/completions"
    extras = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "seed": 7}
    await ask(engine, turn("Hello", ignore_eos=True, stop=["."], **extras))
    assert extras.items() <= server.asked[-1].body.items()
    assert server.asked[-1].body["max_tokens"] == 8


async def test_a_prompt_is_asked_for_at_its_own_endpoint(
    server: ScriptedServer, start: Start
) -> None:
    engine, progress = start(), Progress()
    answer = await ask(engine, turn(prompt="Once upon a time", max_tokens=3), progress)
    assert server.asked[-1].path == "/v1/completions"
    assert server.asked[-1].body["prompt"] == "Once upon a time"
    assert "messages" not in server.asked[-1].body
    assert progress.request["endpoint"] == f"{server.url}/completions"
    assert (answer.message["content"], answer.limit) == ("Once upon a", 3)


async def test_a_prompt_without_max_tokens_fills_the_context(
    server: ScriptedServer, start: Start
) -> None:
    asked = turn(prompt="Once upon", max_tokens=None, ignore_eos=True)
    answer = await ask(start(), asked)
    assert (answer.limited_by, answer.limit) == ("context", 256)
    assert answer.usage.completion_tokens == 254


async def test_a_server_is_learnt_from(server: ScriptedServer, start: Start) -> None:
    engine = start()
    for words in (
        "Unrecognized request argument supplied: stream_options",
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
    ):
        server.misbehave.append(Misbehaviour(400, error(words)))
    progress = Progress()
    answer = await ask(engine, turn("Say hello"), progress)
    assert answer.usage.completion_tokens == progress.tokens == 8
    assert "stream_options" not in server.asked[-1].body
    assert server.asked[-1].body["max_completion_tokens"] == 8
    assert "max_tokens" not in server.asked[-1].body
    await ask(engine, turn("Say hello"))
    assert len(server.asked) == 4


# Answers


async def test_tokens_are_seen_as_they_come(server: ScriptedServer, start: Start) -> None:
    engine, progress = start(), Progress()
    task = asyncio.create_task(ask(engine, turn("Go", ignore_eos=True, max_tokens=200), progress))
    await until(lambda: 0 < progress.tokens < 200)
    answer = await task
    assert progress.tokens == answer.usage.completion_tokens == 200
    assert answer.usage.cached_tokens == 3
    assert progress.growing is None


async def test_a_line_separator_in_an_answer_ends_no_line(start: Start) -> None:
    said = "one\u2028two\x85three\x0bfour"
    answer = await ask(start(), turn(said, max_tokens=100))
    assert answer.message["content"].startswith(said)


@pytest.mark.parametrize("flags", [(), ("--stream-tools",)])
async def test_tool_calls_and_reasoning_are_read(
    server: ScriptedServer, start: Start, flags: tuple[str, ...]
) -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    server.message = {"reasoning": "hm", "tool_calls": [{**CALL, "function": function}]}
    asked = turn("Weather in Oslo?", tools=[WEATHER], max_tokens=50)
    engine = start(*flags)
    answers = [await ask(engine, asked) for _ in range(2)]
    message = answers[0].message
    assert server.asked[-1].body["stream"] is bool(flags)
    assert message["reasoning_content"] == "hm"
    (call,) = message["tool_calls"]
    assert call["function"] == function
    assert call["id"].startswith("call_")
    assert call["id"] != CALL["id"]  # random; ours is the turn's
    assert answers[0].message == answers[1].message


@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["streamed", "whole"])
async def test_a_connection_is_used_again(server: ScriptedServer, start: Start, tools: Any) -> None:
    engine = start()
    for n in range(3):
        await ask(engine, turn(f"Say hello {n}", tools=tools))
    assert server.connections == 1


@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["streamed", "whole"])
async def test_closing_the_connection_ends_a_cancelled_turn_on_the_server(tools: Any) -> None:
    with contextlib.closing(ScriptedServer(speed=2.0)) as server:
        engine = load("openai")(EngineSettings(arguments=(server.url,)))
        asked = turn("Go", ignore_eos=True, max_tokens=200, tools=tools)
        task = asyncio.create_task(ask(engine, asked))
        await until(lambda: server.engine.running() == 1)
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: server.engine.running() == 0, seconds=10)
        assert engine.running() == 0
        engine.close()


# What passes


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
async def test_what_passes_is_asked_again(
    server: ScriptedServer, start: Start, status: int
) -> None:
    server.misbehave.extend([Misbehaviour(status, error("later"))] * 2)
    assert (await ask(start(), turn("Say hello"))).message["content"]
    assert len(server.asked) == 3


@pytest.mark.parametrize("as_date", [False, True])
async def test_all_wait_as_long_as_the_server_asks(
    server: ScriptedServer, start: Start, as_date: bool
) -> None:
    engine, began = start(), time.time()
    wish = formatdate(began + 2, usegmt=True) if as_date else "1"
    server.misbehave.append(Misbehaviour(429, error("slow down"), {"Retry-After": wish}))
    first = asyncio.create_task(ask(engine, turn("one")))
    await until(lambda: len(server.asked) == 1 and engine._pace._not_before > 0)  # type: ignore[attr-defined]
    await asyncio.gather(first, ask(engine, turn("two")))
    assert time.time() - began >= 0.9
    assert len(server.asked) == 3


async def test_at_last_it_is_the_turn_that_failed(server: ScriptedServer, start: Start) -> None:
    server.misbehave.extend([Misbehaviour(500, error("CUDA error"))] * 3)
    with pytest.raises(TurnError, match="500: CUDA error"):
        await ask(start("--retries", "2"), turn("Say hello"))
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    "bad",
    [
        Misbehaviour(pieces=3, then=CUT),
        Misbehaviour(pieces=0, then=CUT),
        Misbehaviour(pieces=3, then=b"data: [DONE]\n\n"),
        Misbehaviour(pieces=3, then=b"data: {half\n\n"),
        Misbehaviour(pieces=3, then=b'data: {"error": {"message": "aborted", "code": 503}}\n\n'),
    ],
    ids=["cut", "cut at once", "early end", "damage", "error"],
)
async def test_a_stream_that_breaks_is_asked_for_again_from_its_beginning(
    server: ScriptedServer, start: Start, bad: Misbehaviour
) -> None:
    server.misbehave.append(bad)
    progress = Progress()
    answer = await ask(start(), turn("Go", ignore_eos=True, max_tokens=9), progress)
    assert len(server.asked) == 2
    assert answer.usage.completion_tokens == progress.tokens == 9
    assert len(answer.message["content"].split()) == 9


async def test_a_server_that_falls_silent_is_given_up(server: ScriptedServer, start: Start) -> None:
    server.misbehave.append(Misbehaviour(pieces=3, then=HANG))
    with pytest.raises(TurnError, match="nothing came"):
        await ask(start("--silence", "0.2"), turn("Go", ignore_eos=True, max_tokens=9))
    assert len(server.asked) == 1


# What does not pass


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_wrong_turn_is_refused_in_the_server_s_words(
    server: ScriptedServer, start: Start, status: int
) -> None:
    server.misbehave.append(Misbehaviour(status, error("roles must alternate")))
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await ask(start(), turn("Say hello"))
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"object": "error", "message": "flat", "code": 400}, "flat"),
        ({"detail": [{"loc": ["body"], "msg": "deep"}]}, "deep"),
        ({"error": "bare", "error_type": "validation"}, "bare"),
        ("plain text", "plain text"),
        ("", "Whatever"),
    ],
)
async def test_words_are_found_wherever_they_are(
    server: ScriptedServer, start: Start, body: Any, words: str
) -> None:
    server.misbehave.append(Misbehaviour(400, body))
    with pytest.raises(InvalidRequest, match=words):
        await ask(start(), turn("Say hello"))


SGLANG_WORDS = (
    "Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total of "
    "{total} tokens: {prompt} tokens from the input messages and {asked} tokens for the completion."
)
VAGUE = "This model's maximum context length is {context} tokens. However, your prompt contains at least 1 input tokens."
SILENT = "Your input exceeds the context window of this model."


@pytest.mark.parametrize("words", [SGLANG_WORDS, VAGUE, SILENT])
@pytest.mark.parametrize("prompt", [False, True])
async def test_what_is_too_long_together_is_cut_to_the_room(
    server: ScriptedServer, start: Start, words: str, prompt: bool
) -> None:
    server.words = words
    text = "word " * 200
    asked = {"ignore_eos": True, "max_tokens": 100}
    answer = await ask(start(), turn(prompt=text, **asked) if prompt else turn(text, **asked))
    assert (answer.finish, answer.limited_by, answer.limit) == ("length", "context", 256)
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == 256
    assert len(server.asked) == 2


@pytest.mark.parametrize("words", [SGLANG_WORDS, VAGUE, SILENT])
async def test_a_prompt_that_is_too_long_alone_has_no_room(
    server: ScriptedServer, start: Start, words: str
) -> None:
    server.words = words
    progress = Progress()
    with pytest.raises(NoRoom) as refused:
        await ask(start(), turn("word " * 300), progress)
    assert refused.value.prompt_tokens >= refused.value.limit == 256
    assert progress.sent is None


async def test_an_answer_is_not_made_shorter_than_it_must_be(
    server: ScriptedServer, start: Start
) -> None:
    asked = turn("word " * 240, ignore_eos=True, max_tokens=100, min_tokens=50)
    answer = await ask(start(), asked)
    assert server.asked[-1].body["min_tokens"] == server.asked[-1].body["max_tokens"]
    assert answer.limited_by == "context"


@pytest.mark.parametrize(
    ("status", "code"), [(401, None), (402, None), (403, None), (429, "insufficient_quota")]
)
async def test_a_server_that_wants_another_key_or_money_costs_no_turn(
    server: ScriptedServer, start: Start, caplog: pytest.LogCaptureFixture, status: int, code: Any
) -> None:
    engine = start()
    server.misbehave.append(Misbehaviour(status, error("pay first", code=code)))
    with pytest.raises(EngineAway, match="pay first") as away:
        await ask(engine, turn("Say hello"))
    assert not away.value.held
    with pytest.raises(EngineAway):
        await engine.healthy()
    with pytest.raises(EngineAway):
        await ask(engine, turn("Say hello"))
    assert len(server.asked) == 1
    assert "pay first" in caplog.text


async def test_forbidden_is_the_turn_s_own_where_others_were_answered(
    server: ScriptedServer, start: Start
) -> None:
    engine = start()
    await ask(engine, turn("Say hello"))
    server.misbehave.append(Misbehaviour(403, error("flagged by moderation")))
    with pytest.raises(InvalidRequest, match="403: flagged"):
        await ask(engine, turn("Say what?"))


@pytest.mark.parametrize(
    ("finish", "expected"), [("content_filter", InvalidRequest), ("abort", TurnError)]
)
async def test_an_end_that_is_no_answer_is_a_failure(
    server: ScriptedServer, start: Start, finish: str, expected: type[Exception]
) -> None:
    choice = {"message": {"content": "I"}, "finish_reason": finish}
    server.misbehave.append(Misbehaviour(200, {"choices": [choice], "usage": {}}))
    with pytest.raises(expected):
        await ask(start(), turn("Say hello"))


async def test_a_server_that_does_not_count_is_counted_for(
    server: ScriptedServer, start: Start
) -> None:
    choice = {"message": {"content": "Hello"}, "finish_reason": "stop"}
    server.misbehave.append(Misbehaviour(200, {"choices": [choice]}))
    answer = await ask(start(), turn("Say hello"))
    assert answer.usage.completion_tokens == 1


# A server that goes away


async def well(engine: Engine) -> None:
    """Asks, as a worker does, until it is well; raises EngineDied."""
    while True:
        with contextlib.suppress(EngineAway):
            if await engine.healthy():
                return
        await asyncio.sleep(0.01)


async def unwell(engine: Engine) -> None:
    """Asks until it raises."""
    while True:
        await engine.healthy()
        await asyncio.sleep(0.01)


async def test_a_server_that_dies_hands_its_turns_back(
    server: ScriptedServer, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine, progress = start(), Progress()
    task = asyncio.create_task(ask(engine, turn("Go", ignore_eos=True, max_tokens=250), progress))
    await until(lambda: progress.tokens)
    server.stop()
    with pytest.raises(EngineAway) as away:
        await task
    assert away.value.held
    with pytest.raises(EngineAway) as away:
        await ask(engine, turn("Say hello"))
    assert not away.value.held
    with pytest.raises(EngineAway):
        await engine.healthy()
    assert caplog.text.count("is away") == 1
    server.start()

    await asyncio.wait_for(well(engine), 30)
    assert (await ask(engine, turn("Say hello"))).message["content"]
    assert "is there again" in caplog.text


async def test_a_server_that_never_was_reached_did_not_hold_the_turn(
    server: ScriptedServer, start: Start
) -> None:
    engine = start()
    server.stop()
    with pytest.raises(EngineAway) as away:
        await ask(engine, turn("Say hello"))
    assert not away.value.held


async def test_a_server_that_hangs_with_its_health_check_is_away(
    server: ScriptedServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_QUIET_SECONDS", 0.05)
    engine, progress = start(), Progress()
    server.misbehave.append(Misbehaviour(pieces=3, then=HANG))
    task = asyncio.create_task(ask(engine, turn("Go", ignore_eos=True, max_tokens=9), progress))
    await until(lambda: progress.tokens)
    server.other["/health"] = (503, "the engine is dead")

    with pytest.raises(EngineAway, match="the engine is dead"):
        await asyncio.wait_for(unwell(engine), 30)
    with pytest.raises(EngineAway) as away:
        await task
    assert away.value.held


async def test_a_server_that_is_only_slow_is_not_given_up(
    server: ScriptedServer, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "_QUIET_SECONDS", 0.0)
    engine, progress = start(), Progress()
    server.misbehave.append(Misbehaviour(pieces=3, then=HANG))
    task = asyncio.create_task(ask(engine, turn("Go", ignore_eos=True, max_tokens=9), progress))
    await until(lambda: progress.tokens)
    for _ in range(10):
        assert await engine.healthy()
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})


async def test_a_server_that_comes_back_as_another_is_a_new_engine(
    server: ScriptedServer, start: Start
) -> None:
    engine = start()
    server.stop()
    with pytest.raises(EngineAway):
        await ask(engine, turn("Say hello"))
    server.other["/version"] = (200, {"version": "10.0"})
    server.start()

    with pytest.raises(EngineDied, match=r"vllm 10\.0"):
        await asyncio.wait_for(well(engine), 30)


async def test_an_idle_server_is_not_asked(server: ScriptedServer, start: Start) -> None:
    engine = start()
    before = len(server.requests)
    for _ in range(10):
        assert await engine.healthy()
    assert len(server.requests) == before


async def test_closing_ends_what_runs(server: ScriptedServer, start: Start) -> None:
    engine, progress = start(), Progress()
    task = asyncio.create_task(ask(engine, turn("Go", ignore_eos=True, max_tokens=250), progress))
    await until(lambda: progress.tokens)
    await asyncio.to_thread(engine.close)
    engine.close()
    with pytest.raises(EngineDied):
        await task
    for call in (ask(engine, turn("Say hello")), engine.healthy()):
        with pytest.raises(EngineDied):
            await call
    await until(lambda: server.engine.running() == 0)


def test_without_aiohttp_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("turnmill_worker.engines.openai")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(UsageError, match=r"turnmill\[openai\]"):
        load("openai")
