"""The SGLang adapter, on the real SGLang with a tiny model on the CPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from tests.engines import sglang_env, tiny_model
from tests.engines.bodies import (
    BODIES,
    FORCED,
    PROMPTS,
    SAMPLING_FIELDS,
    rounded,
    without_call_ids,
)
from tests.engines.own_server import Server
from tests.engines.sglang_fixtures import SGLANG

from turnmill.errors import UsageError
from turnmill.turn import Turn
from turnmill_worker.engines.base import (
    Answer,
    Capacity,
    EngineSettings,
    InvalidRequest,
    NoRoom,
    Progress,
    TurnError,
)
from turnmill_worker.engines.identity import prompt_digest
from turnmill_worker.engines.sglang import SGLangEngine, build
from turnmill_worker.engines.sglang_seeds import Seeds

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not SGLANG, reason="SGLang is not installed here"),
    pytest.mark.timeout(400),
]

TOTAL = 510
"""Tokens. SGLang cuts prompt and answer together to 2 less than the context."""
MAX_PROMPT = 505
"""Tokens. The longest prompt that SGLang takes: 7 less than the context."""


@dataclass
class Asked:
    answer: Answer
    progress: Progress = field(default_factory=Progress)


Ask = Callable[..., Awaitable[Asked]]


@pytest.fixture
def ask(sglang_engine: SGLangEngine) -> Ask:
    """Answers a turn made of `messages` (a text is one user message) and a turn's other fields."""

    async def ask(messages: str | list[dict[str, Any]], **fields: Any) -> Asked:
        progress = Progress()
        answer = await sglang_engine.answer(make_turn(messages, **fields), new_rid(), progress)
        return Asked(answer, progress)

    return ask


def make_turn(messages: str | list[dict[str, Any]], **fields: Any) -> Turn:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return Turn.from_body({"model": "tiny", "messages": messages, **fields})


def new_rid() -> str:
    return uuid4().hex


def greedy(**sampling: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 12, **sampling}


async def until(state: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not state():  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)


# Many calls at once


def test_calls_from_several_loops_and_threads_are_in_the_engine_at_once(
    sglang_engine: SGLangEngine,
) -> None:
    params = {"max_new_tokens": 300, "ignore_eos": True, "temperature": 0}
    outputs: list[Any] = []

    async def two(first: int) -> None:
        calls = (sglang_engine.agenerate(f"Number {n}", params) for n in (first, first + 1))
        outputs.extend(await asyncio.gather(*calls))

    def one(number: int) -> None:
        outputs.append(sglang_engine.generate(f"Number {number}", params))

    callers = [threading.Thread(target=asyncio.run, args=(two(first),)) for first in (0, 2, 4)]
    callers += [threading.Thread(target=one, args=(number,)) for number in (6, 7)]
    for caller in callers:
        caller.start()
    inside, scheduled = 0, 0
    while any(caller.is_alive() for caller in callers):
        inside = max(inside, sglang_engine.running())
        loads = sglang_engine._now(sglang_engine._manager.get_loads())
        scheduled = max(scheduled, sum(load.num_running_reqs for load in loads))
    assert inside == 8
    assert scheduled == 8
    assert [output["meta_info"]["completion_tokens"] for output in outputs] == [300] * 8


def test_blocking_calls_work_where_the_engines_own_does_not(sglang_engine: SGLangEngine) -> None:
    params = {"max_new_tokens": 3, "temperature": 0}
    output = sglang_engine.generate("Hello", params)
    assert output["meta_info"]["completion_tokens"] == 3
    with pytest.raises(RuntimeError, match="this event loop is already running"):
        sglang_engine._engine.generate("Hello", params)
    with pytest.raises(RuntimeError, match="this event loop is already running"):
        sglang_engine._engine.get_server_info()


async def test_streaming_is_refused(sglang_engine: SGLangEngine) -> None:
    with pytest.raises(ValueError, match="stream=True"):
        await sglang_engine.agenerate("Hello", stream=True)


# What it is, and what it holds


def test_capacity_is_the_same_before_and_after_the_loop_runs(
    sglang_engine: SGLangEngine, sglang_capacity_before: list[Capacity]
) -> None:
    assert sglang_capacity_before == [Capacity(slots=32, context=TOTAL, kv_tokens=16384)]
    assert sglang_engine.capacity() == sglang_capacity_before[0]


def test_capacity_counts_all_data_parallel_ranks(
    sglang_engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_engine._engine, "server_args", SimpleNamespace(dp_size=3))
    assert sglang_engine.capacity() == Capacity(slots=96, context=TOTAL, kv_tokens=3 * 16384)


@pytest.mark.parametrize(("wanted", "slots"), [(4, 4), (32, 32), (1000, 32), (None, 32)])
def test_slots_are_what_is_wanted_up_to_what_there_is(
    sglang_engine: SGLangEngine,
    monkeypatch: pytest.MonkeyPatch,
    wanted: int | None,
    slots: int,
) -> None:
    monkeypatch.setattr(sglang_engine, "_settings", EngineSettings(slots=wanted))
    assert sglang_engine.capacity().slots == slots


def test_identity(sglang_engine: SGLangEngine, sglang_model: Path) -> None:
    identity = sglang_engine.identity
    assert (identity.engine, identity.version) == ("sglang", "0.5.23")
    assert (identity.model, identity.dtype) == (str(sglang_model), "float32")
    assert sglang_engine._template() == tiny_model.CHAT_TEMPLATE
    assert sglang_engine.served_name == "tiny-qwen2"


def test_the_processs_own_logging_stays(sglang_engine: SGLangEngine) -> None:
    assert not any(
        handler.formatter and "%(asctime)s]" in str(handler.formatter._fmt)
        for handler in logging.getLogger().handlers
    )


async def test_healthy(sglang_engine: SGLangEngine) -> None:
    assert await sglang_engine.healthy()
    assert await asyncio.gather(*(sglang_engine.healthy() for _ in range(3))) == [True] * 3


# Lengths


async def long_prompt(ask: Ask, tokens: int) -> str:
    """A user message that makes a prompt of just so many tokens."""
    asked = await ask("Z", sampling=greedy(max_tokens=1))
    around: int = asked.progress.request["prompt_tokens"] - 1
    return "Z" * (tokens - around)


async def test_the_longest_prompt_and_what_is_left_for_its_answer(ask: Ask) -> None:
    text = await long_prompt(ask, MAX_PROMPT)
    asked = await ask(text, sampling=greedy(max_tokens=100, min_tokens=50, ignore_eos=True))
    answer = asked.answer
    assert answer.usage.prompt_tokens == MAX_PROMPT
    assert answer.usage.completion_tokens == TOTAL - MAX_PROMPT
    assert (answer.finish, answer.limited_by, answer.limit) == ("length", "context", TOTAL)
    assert asked.progress.request["sampling"]["max_new_tokens"] == TOTAL - MAX_PROMPT


async def test_an_answer_that_just_fits_is_not_cut(ask: Ask) -> None:
    text = await long_prompt(ask, TOTAL - 20)
    answer = (await ask(text, sampling=greedy(max_tokens=20, ignore_eos=True))).answer
    assert answer.usage.completion_tokens == 20
    assert (answer.finish, answer.limited_by, answer.limit) == ("length", "output", 20)


async def test_without_max_tokens_the_context_is_the_limit(ask: Ask) -> None:
    text = await long_prompt(ask, TOTAL - 20)
    answer = (await ask(text, sampling={"temperature": 0, "ignore_eos": True})).answer
    assert answer.usage.completion_tokens == 20
    assert (answer.finish, answer.limited_by, answer.limit) == ("length", "context", TOTAL)


@pytest.mark.parametrize("tokens", [MAX_PROMPT + 1, TOTAL, 512, 600])
async def test_a_prompt_that_is_too_long_does_not_reach_the_engine(
    ask: Ask, sglang_engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    text = await long_prompt(ask, tokens)
    monkeypatch.setattr(sglang_engine._manager, "generate_request", None)
    with pytest.raises(NoRoom) as raised:
        await ask(text, sampling=greedy())
    assert (raised.value.prompt_tokens, raised.value.limit) == (tokens, MAX_PROMPT)


def test_these_are_the_limits_of_sglang_itself(sglang_engine: SGLangEngine) -> None:
    """What the adapter keeps turns from meeting: two refusals, and a cut that nobody is told of."""

    def generate(prompt_tokens: int, new_tokens: int) -> int:
        output = sglang_engine.generate(
            input_ids=[50] * prompt_tokens,
            sampling_params={"max_new_tokens": new_tokens, "ignore_eos": True},
        )
        made: int = output["meta_info"]["completion_tokens"]
        return made

    assert generate(MAX_PROMPT, 7) == TOTAL - MAX_PROMPT == 5
    with pytest.raises(ValueError, match="exceeds the maximum allowed length"):
        generate(MAX_PROMPT + 1, 1)
    with pytest.raises(ValueError, match="Requested token count exceeds"):
        generate(MAX_PROMPT, 8)


# Answers


async def test_an_answer_ends_at_its_own_limit(ask: Ask) -> None:
    asked = await ask("Hello", sampling=greedy(max_tokens=40, ignore_eos=True))
    answer, progress = asked.answer, asked.progress
    assert (answer.finish, answer.limited_by, answer.limit) == ("length", "output", 40)
    assert answer.message["role"] == "assistant"
    assert answer.usage.completion_tokens == progress.tokens == 40
    assert progress.request["endpoint"] == "engine.generate"
    assert progress.request["prompt_tokens"] == answer.usage.prompt_tokens
    times = [progress.rendered, progress.sent, progress.first_token, progress.last_token]
    assert times == sorted(times)  # type: ignore[type-var]
    assert progress.first_token != progress.last_token


async def test_an_answer_ends_at_a_stop_string(ask: Ask) -> None:
    whole = (await ask("Hello", sampling=greedy(max_tokens=40, ignore_eos=True))).answer
    text = text_of(whole)
    stop = text[len(text) // 2 :][:3]
    answer = (await ask("Hello", sampling=greedy(max_tokens=40, stop=[stop]))).answer
    assert (answer.finish, answer.limited_by, answer.limit) == ("stop", None, None)
    assert text_of(answer) == text[: text.index(stop)]


def text_of(answer: Answer) -> str:
    """All text of an answer. The reasoning parser takes text without </think> for reasoning."""
    return (answer.message.get("reasoning_content") or "") + answer.message["content"]


async def test_an_answer_ends_at_the_end_of_turn_token(ask: Ask, token_of: TokenOf) -> None:
    sampling = greedy(logit_bias={str(token_of("<|im_end|>")): 50})
    answer = (await ask("Hello", sampling=sampling)).answer
    assert (answer.finish, answer.limited_by, answer.message["content"]) == ("stop", None, "")


async def test_logprobs_have_openais_shape(ask: Ask) -> None:
    answer = (
        await ask("Hello", sampling=greedy(max_tokens=20, logprobs=True, top_logprobs=2))
    ).answer
    assert answer.logprobs is not None
    tokens = answer.logprobs["content"]
    assert len(tokens) == answer.usage.completion_tokens == 20
    said = b"".join(bytes(token["bytes"]) for token in tokens).decode(errors="replace")
    for special in ("<|im_start|>", "<|endoftext|>"):  # the reply leaves these out
        said = said.replace(special, "")
    assert said == text_of(answer)
    for token in tokens:
        assert set(token) == {"token", "bytes", "logprob", "top_logprobs"}
        assert token["logprob"] == max(top["logprob"] for top in token["top_logprobs"]) < 0
        assert [set(top) for top in token["top_logprobs"]] == [{"token", "bytes", "logprob"}] * 2


async def test_a_prompt_that_was_seen_before_is_cached(ask: Ask) -> None:
    text = f"Never seen before: {uuid4()} {uuid4()}"
    first = (await ask(text, sampling=greedy())).answer
    second = (await ask(text, sampling=greedy())).answer
    assert second.usage.cached_tokens == first.usage.prompt_tokens - 1
    assert second.usage.cached_tokens > first.usage.cached_tokens


async def test_unset_sampling_comes_from_the_models_generation_config(ask: Ask) -> None:
    sent = (await ask("Hello", sampling={"max_tokens": 2})).progress.request["sampling"]
    assert tiny_model.SAMPLING.items() <= sent.items()
    sent = (await ask("Hello", sampling={"max_tokens": 2, "top_k": 3})).progress.request["sampling"]
    assert {**tiny_model.SAMPLING, "top_k": 3}.items() <= sent.items()


async def test_every_sampling_field_is_passed(ask: Ask) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 4,
        "min_p": 0.125,
        "max_tokens": 3,
        "min_tokens": 2,
        "stop": ["never"],
        "seed": 7,
        "frequency_penalty": 0.75,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"60": 1.0},
        "ignore_eos": True,
    }
    sent = (await ask("Hello", sampling=sampling)).progress.request["sampling"]
    names = {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
    }
    assert {
        names.get(name, name): value for name, value in sampling.items()
    }.items() <= sent.items()


HOT = {"temperature": 1, "top_p": 1, "top_k": -1, "max_tokens": 20, "ignore_eos": True}


async def test_seeds_have_no_effect_without_deterministic_inference(ask: Ask) -> None:
    """Which is SGLang's way, and can be had on GPUs only."""
    first, second = [(await ask("Draw", sampling={**HOT, "seed": 1})).answer for _ in range(2)]
    assert text_of(first) != text_of(second)


async def test_draws_are_sent_with_seeds_of_their_own_where_seeds_count(
    ask: Ask, sglang_engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_engine, "_seeds", Seeds(used=True))
    sent = [
        (await ask("Draw", sampling={**HOT, **own}, sample=sample)).progress.request["sampling"]
        for sample, own in [(0, {}), (1, {}), (0, {"seed": 7})]
    ]
    first, second, given = [each["sampling_seed"] for each in sent]
    assert len({first, second, 42}) == 3  # SGLang's, for all that have none
    assert given == 7


async def test_a_model_name_with_a_colon_asks_for_no_adapter(sglang_engine: SGLangEngine) -> None:
    turn = make_turn("Hello", sampling=greedy()).model_copy(update={"model": "qwen2.5:7b"})
    assert (await sglang_engine.answer(turn, new_rid(), Progress())).finish == "length"


# Tools and reasoning

TokenOf = Callable[[str], int]


@pytest.fixture
def token_of(sglang_engine: SGLangEngine) -> TokenOf:
    tokenizer = sglang_engine._manager.tokenizer

    def token_of(text: str) -> int:
        (token,) = tokenizer.encode(text)
        return int(token)

    return token_of


def thinking_first(token_of: TokenOf) -> dict[str, Any]:
    """Sampling with which noise says "A</think>" first, and neither of them again: the first bias is
    larger than the second, both are larger than all logits, and the penalties are larger yet."""
    bias = {str(token_of("A")): 3.5, str(token_of("</think>")): 2.0}
    return greedy(logit_bias=bias, presence_penalty=2.0, frequency_penalty=2.0)


async def test_reasoning_is_kept_and_passed_back(
    ask: Ask, token_of: TokenOf, sglang_engine: SGLangEngine
) -> None:
    answer = (await ask("Think", sampling=thinking_first(token_of))).answer
    assert answer.message["reasoning_content"] == "A"
    assert answer.message["content"]
    history = [
        {"role": "user", "content": "Think"},
        answer.message,
        {"role": "user", "content": "Go on"},
    ]
    *_, ids = sglang_engine._render(make_turn(history), new_rid())
    prompt = sglang_engine._manager.tokenizer.decode(ids)
    assert f"<think>\nA\n</think>\n\n{answer.message['content']}<|im_end|>" in prompt


@pytest.fixture
def to_the_point(sglang_engine: SGLangEngine) -> dict[str, Any]:
    """Sampling with which noise, made to say JSON, neither fills it with white space nor goes on."""
    tokenizer = sglang_engine._manager.tokenizer
    spaces = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()]
    bias = {str(token): -50.0 for token in spaces} | {str(tokenizer.eos_token_id): 50.0}
    return greedy(max_tokens=100, logit_bias=bias)


@pytest.mark.parametrize("name", BODIES)
async def test_prompt_and_reply_are_those_of_sglangs_http_server(
    ask: Ask, sglang_server: Server, to_the_point: dict[str, Any], name: str
) -> None:
    body = {"temperature": 0, "max_tokens": 12, **BODIES[name]}
    if name == FORCED:
        body |= to_the_point
    theirs = await asyncio.to_thread(
        sglang_server.chat, {"model": "tiny-qwen2", "return_prompt_token_ids": True, **body}
    )
    choice = theirs["choices"][0]
    sampling = {key: body.pop(key) for key in list(body) if key in SAMPLING_FIELDS}
    ours = await ask(body.pop("messages"), sampling=sampling, **body)

    if name == FORCED:
        assert choice["message"]["tool_calls"]
    assert ours.progress.request["prompt_digest"] == prompt_digest(choice["prompt_token_ids"])
    assert without_call_ids(ours.answer.message) == without_call_ids(choice["message"])
    assert ours.answer.finish == choice["finish_reason"]
    assert ours.answer.usage.prompt_tokens == theirs["usage"]["prompt_tokens"]
    assert ours.answer.usage.completion_tokens == theirs["usage"]["completion_tokens"]
    assert rounded(ours.answer.logprobs) == rounded(choice["logprobs"])


@pytest.mark.parametrize("name", PROMPTS)
async def test_what_follows_a_prompt_is_as_from_sglangs_http_server(
    ask: Ask, sglang_server: Server, name: str
) -> None:
    fields = {"temperature": 0, "max_tokens": 12, **PROMPTS[name]}
    body = {key: fields[key] for key in fields if key not in ("logprobs", "top_logprobs")}
    if "logprobs" in fields:
        body["logprobs"] = fields["top_logprobs"]
    theirs = await asyncio.to_thread(sglang_server.complete, {"model": "tiny-qwen2", **body})
    choice = theirs["choices"][0]
    sampling = {key: fields.pop(key) for key in list(fields) if key in SAMPLING_FIELDS}
    ours = await ask([], sampling=sampling, **fields)

    assert ours.answer.message == {"role": "assistant", "content": choice["text"]}
    assert ours.answer.finish == choice["finish_reason"]
    assert ours.answer.usage.prompt_tokens == theirs["usage"]["prompt_tokens"]
    assert ours.answer.usage.completion_tokens == theirs["usage"]["completion_tokens"]
    if "logprobs" in body:
        content = (ours.answer.logprobs or {})["content"]
        assert rounded([token["logprob"] for token in content]) == rounded(
            choice["logprobs"]["token_logprobs"]
        )


# Turns that are wrong


async def test_a_template_that_raises_is_heard_in_its_own_words(
    ask: Ask, sglang_server: Server
) -> None:
    messages = [{"role": "user", "content": "One"}, {"role": "user", "content": "Two"}]
    words = "Conversation roles must alternate user/assistant/user/assistant/..."
    with pytest.raises(InvalidRequest) as raised:
        await ask(messages)
    assert str(raised.value) == words
    theirs = await asyncio.to_thread(sglang_server.chat, {"model": "m", "messages": messages})
    assert theirs["message"] == words


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "Tools cannot be empty"),
        ({"sampling": {"min_tokens": 5, "max_tokens": 2}}, "min_new_tokens must be in"),
        ({"sampling": {"top_k": 0}}, "top_k must be"),
        ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "Request-supplied chat_template"),
    ],
)
async def test_what_sglang_refuses_is_an_invalid_request(
    ask: Ask, sglang_engine: SGLangEngine, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await ask("Hello", **fields)
    assert sglang_engine.running() == 0


async def test_images_are_refused_by_a_model_that_takes_none(ask: Ask) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidRequest, match="only supports text input"):
        await ask([{"role": "user", "content": [image]}])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--no-such-argument",), "unrecognized arguments: --no-such-argument"),
        (("--tp-size", "many"), "invalid int value: 'many'"),
        (("--allow-auto-truncate",), "never cut"),
        (("--model-path", "/no/such/model"), "/no/such/model"),
        (("--lora-paths", "a=/no/such/adapter"), "--lora-paths /no/such/adapter: there is no such"),
    ],
)
def test_arguments_that_sglang_does_not_take_are_one_line(
    sglang_model: Path, arguments: tuple[str, ...], words: str
) -> None:
    settings = EngineSettings(
        model=str(sglang_model), arguments=(*sglang_env.ARGUMENTS, *arguments)
    )
    with pytest.raises(UsageError) as raised:
        build(settings)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


# Ends


ENDLESS = {"ignore_eos": True, "max_tokens": 450}


async def test_a_cancelled_turn_leaves_the_engine(sglang_engine: SGLangEngine) -> None:
    turns = [
        asyncio.create_task(
            sglang_engine.answer(make_turn(f"Hello {n}", sampling=ENDLESS), new_rid(), Progress())
        )
        for n in range(4)
    ]
    await until(lambda: sglang_engine.running() == 4)
    for turn in turns:
        turn.cancel()
    assert await asyncio.gather(*turns, return_exceptions=True) == [
        ANY_CANCELLED,
    ] * len(turns)
    await until(lambda: sglang_engine.running() == 0)


class _AnyCancelled:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, asyncio.CancelledError)


ANY_CANCELLED = _AnyCancelled()


async def test_an_aborted_turn_leaves_the_engine(sglang_engine: SGLangEngine) -> None:
    rid, progress = new_rid(), Progress()
    turn = asyncio.create_task(
        sglang_engine.answer(make_turn("Hello", sampling=ENDLESS), rid, progress)
    )
    await until(lambda: progress.tokens > 0)
    await sglang_engine.abort("0" * len(rid))
    assert sglang_engine.running() == 1
    await sglang_engine.abort(rid)
    with pytest.raises(asyncio.CancelledError):
        await turn
    await until(lambda: sglang_engine.running() == 0)


async def test_a_turn_that_the_engine_aborts_itself_fails_alone(
    sglang_engine: SGLangEngine,
) -> None:
    rid, progress = new_rid(), Progress()
    turn = asyncio.create_task(
        sglang_engine.answer(make_turn("Hello", sampling=ENDLESS), rid, progress)
    )
    await until(lambda: progress.tokens > 0)
    sglang_engine._thread.call_soon(sglang_engine._manager.abort_request, rid)
    with pytest.raises(TurnError):
        await turn


def test_life_and_death_in_a_process_of_its_own(life: Future[Life]) -> None:
    """Closing ends thread and processes; the death of a process fails every call; nothing is left."""
    seen = life.result()
    assert seen.status == 0, seen.errors[-3000:]
    start = seen.result["start"]
    assert start.pop("error").startswith("engine sglang: Chat template /no/such/template is not")
    assert start == {"children": 0, "threads": []}
    assert seen.result["parsers"] == ["qwen", None]
    assert seen.result["close"] == {
        "waiting": ["EngineDied"],
        "children": 0,
        "threads": [],
        "later": ["EngineDied"],
        "own_signal_handler": True,
        "signal_handler_left": False,
    }
    assert seen.result["death"] == {
        "waiting": ["EngineDied"] * 9,
        "later": ["EngineDied"] * 2,
        "healthy": "EngineDied",
        "running": 0,
    }
    assert "scheduler_0 ended with exit code -9" in seen.errors
    for complaint in ("Task was destroyed", "never retrieved", "never awaited", "Traceback"):
        assert complaint not in seen.errors


@dataclass
class Life:
    status: int
    result: dict[str, Any]
    errors: str


@pytest.fixture(scope="module", autouse=True)
def life(sglang_server: Server, sglang_model: Path) -> Iterator[Future[Life]]:
    """Runs while the other tests do: it is mostly the starts of two engines."""
    program = ["-m", "tests.engines.sglang_life"]
    process = subprocess.Popen(
        [sys.executable, *program, str(sglang_model), *sglang_env.ARGUMENTS],
        cwd=Path(__file__).parents[2],
        env=sglang_env.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ended: Future[Life] = Future()

    def wait() -> None:
        printed, errors = process.communicate()
        result = json.loads(printed) if process.returncode == 0 else {}
        ended.set_result(Life(process.returncode, result, errors))

    waiter = threading.Thread(target=wait)
    waiter.start()
    yield ended
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    waiter.join()
