"""The vLLM adapter, on the real vLLM with a tiny model on the CPU."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engines import tiny_model, vllm_env
from tests.engines.asking import new_rid, turn, until
from tests.engines.bodies import (
    BODIES,
    FORCED,
    PROMPTS,
    rounded,
    without_call_ids,
)
from tests.engines.own_server import Server
from tests.engines.vllm_fixtures import VLLM

from turnmill.errors import UsageError
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
from turnmill_worker.engines.vllm import VLLMEngine, build

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM, reason="vLLM is not installed here"),
    pytest.mark.timeout(400),
]

CONTEXT = tiny_model.CONTEXT
ENDLESS = {"ignore_eos": True, "max_tokens": 450}


@dataclass
class Asked:
    answer: Answer
    progress: Progress


Ask = Callable[..., Awaitable[Asked]]


@pytest.fixture
def ask(vllm_engine: VLLMEngine) -> Ask:
    """Answers a turn of `messages` (a text is one user message), a turn's other fields, and sampling."""

    async def ask(*messages: str | dict[str, Any], **fields: Any) -> Asked:
        progress = Progress()
        answer = await vllm_engine.answer(turn(*messages, **fields), new_rid(), progress)
        return Asked(answer, progress)

    return ask


# Many calls at once


def test_calls_from_several_loops_and_threads_are_in_the_engine_at_once(
    vllm_engine: VLLMEngine,
) -> None:
    answers: list[Answer] = []

    async def two(first: int) -> None:
        asked = (turn(f"Number {n}", ignore_eos=True, max_tokens=300) for n in (first, first + 1))
        calls = (vllm_engine.answer(each, new_rid(), Progress()) for each in asked)
        answers.extend(await asyncio.gather(*calls))

    callers = [threading.Thread(target=asyncio.run, args=(two(first),)) for first in (0, 2, 4, 6)]
    for caller in callers:
        caller.start()
    inside = 0
    while any(caller.is_alive() for caller in callers):
        inside = max(inside, vllm_engine.running())
    assert inside == 8
    assert [answer.usage.completion_tokens for answer in answers] == [300] * 8


async def test_turns_of_higher_priority_are_answered_first(vllm_engine: VLLMEngine) -> None:
    slots = vllm_engine.capacity().slots
    endless = [turn(f"first {n}", **ENDLESS) for n in range(slots)]
    running = [asyncio.create_task(answered(vllm_engine, each, 9)) for each in endless]
    await until(lambda: vllm_engine.running() == slots)
    order: list[int] = []

    async def waits(priority: int) -> None:
        await answered(vllm_engine, turn(f"then {priority}", max_tokens=1), priority)
        order.append(priority)

    later = [asyncio.create_task(waits(priority)) for priority in (2, 9, 0, 6)]
    await until(lambda: vllm_engine.running() == slots + len(later))
    running[0].cancel()  # one place for all of them
    await asyncio.gather(*later)
    assert order == [9, 6, 2, 0]
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    await until(lambda: vllm_engine.running() == 0)


async def answered(engine: VLLMEngine, asked: Any, priority: int) -> Answer:
    return await engine.answer(asked, new_rid(), Progress(priority=priority))


# What it is, and what it holds


@pytest.mark.parametrize(("wanted", "slots"), [(4, 4), (1000, 32), (None, 32)])
def test_slots_are_what_is_wanted_up_to_what_there_is(
    vllm_engine: VLLMEngine,
    monkeypatch: pytest.MonkeyPatch,
    wanted: int | None,
    slots: int,
) -> None:
    monkeypatch.setattr(vllm_engine, "_settings", EngineSettings(slots=wanted))
    tokens = vllm_env.CACHE_BLOCKS * vllm_env.BLOCK
    assert vllm_engine.capacity() == Capacity(slots, CONTEXT, tokens)


def test_identity(vllm_engine: VLLMEngine, vllm_model: Path) -> None:
    identity = vllm_engine.identity
    assert (identity.engine, identity.version) == ("vllm", "0.32.0")
    assert (identity.model, identity.dtype) == (str(vllm_model), "float32")
    assert vllm_engine._template() == tiny_model.CHAT_TEMPLATE
    assert vllm_engine.served_name == "tiny-qwen2"


# Lengths


async def long_prompt(ask: Ask, tokens: int) -> str:
    """A user message that makes a prompt of just so many tokens."""
    asked = await ask("Z", max_tokens=1)
    around: int = asked.progress.request["prompt_tokens"] - 1
    return "Z" * (tokens - around)


async def test_the_longest_prompt_and_what_is_left_for_its_answer(ask: Ask) -> None:
    text = await long_prompt(ask, CONTEXT - 1)
    asked = await ask(text, max_tokens=100, min_tokens=50, ignore_eos=True)
    answer = asked.answer
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (CONTEXT - 1, 1)
    assert (answer.finish, answer.limited_by, answer.limit) == ("length", "context", CONTEXT)
    assert asked.progress.request["sampling"]["max_tokens"] == 1


async def test_an_answer_that_just_fits_is_not_cut(ask: Ask) -> None:
    text = await long_prompt(ask, CONTEXT - 20)
    answer = (await ask(text, max_tokens=20, ignore_eos=True)).answer
    assert (answer.finish, answer.limited_by, answer.limit) == ("length", "output", 20)


@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1, 5 * CONTEXT])
async def test_a_prompt_that_is_too_long_does_not_reach_the_engine(
    ask: Ask, vllm_engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    text = await long_prompt(ask, tokens)
    monkeypatch.setattr(vllm_engine._client, "generate", None)
    with pytest.raises(NoRoom) as raised:
        await ask(text)
    assert (raised.value.prompt_tokens, raised.value.limit) == (tokens, CONTEXT)


# Sampling


async def test_unset_sampling_comes_from_the_models_generation_config(ask: Ask) -> None:
    sent = (await ask("Hello", temperature=None)).progress.request["sampling"]
    assert tiny_model.SAMPLING.items() <= sent.items()
    sent = (await ask("Hello", temperature=None, top_k=3)).progress.request["sampling"]
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
        "ignore_eos": True,
    }
    sent = (await ask("Hello", **sampling, logit_bias={"60": 1.0})).progress.request["sampling"]
    assert sampling.items() <= sent.items()
    assert sent["logit_bias"] == {60: 1.0}


async def test_a_seed_draws_the_same_again(ask: Ask) -> None:
    hot = {"temperature": 1.5, "top_k": -1, "top_p": 1.0, "max_tokens": 20, "ignore_eos": True}
    first, same, other = [(await ask("Draw", seed=s, **hot)).answer.message for s in (1, 1, 2)]
    assert first == same != other


async def test_a_prompt_that_was_seen_before_is_cached(ask: Ask) -> None:
    text = f"Never seen before: {new_rid()}" + " again" * 60  # whole blocks are cached
    first, second = [(await ask(text)).answer.usage for _ in range(2)]
    assert second.cached_tokens > first.cached_tokens


async def test_a_model_name_of_ones_own_is_no_adapter(vllm_engine: VLLMEngine) -> None:
    asked = turn("Hello").model_copy(update={"model": "qwen2.5:7b"})
    assert (await vllm_engine.answer(asked, new_rid(), Progress())).message


# Tools and reasoning

TokenOf = Callable[[str], int]


@pytest.fixture
def token_of(vllm_engine: VLLMEngine) -> TokenOf:
    tokenizer = vllm_engine._client.renderer.tokenizer

    def token_of(text: str) -> int:
        (token,) = tokenizer.encode(text)
        return int(token)

    return token_of


async def test_reasoning_is_kept_and_passed_back(
    ask: Ask, token_of: TokenOf, vllm_engine: VLLMEngine
) -> None:
    # Noise says "A</think>" first, and neither of them again: the first bias is larger than the second, both are larger
    # than all logits, and the penalties are larger yet.
    bias = {str(token_of("A")): 3.5, str(token_of("</think>")): 2.0}
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    answer = (await ask("Think", logit_bias=bias, **penalties)).answer
    assert answer.message["reasoning_content"] == "A"
    assert answer.message["content"]
    assert answer.usage.reasoning_tokens
    asked = await ask("Think", answer.message, "Go on", max_tokens=1)
    rendered = vllm_engine._client.renderer.tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Think"},
            answer.message,
            {"role": "user", "content": "Go on"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert asked.progress.request["prompt_digest"] == prompt_digest(rendered)


@pytest.fixture
def to_the_point(vllm_engine: VLLMEngine) -> dict[str, Any]:
    """Sampling with which noise, made to say JSON, neither fills it with white space nor goes on."""
    tokenizer = vllm_engine._client.renderer.tokenizer
    spaces = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()]
    bias = {str(token): -50.0 for token in spaces} | {str(tokenizer.eos_token_id): 50.0}
    return {"max_tokens": 100, "logit_bias": bias}


@pytest.mark.parametrize("name", BODIES)
async def test_prompt_and_reply_are_those_of_vllms_http_server(
    ask: Ask, vllm_server: Server, vllm_model: Path, to_the_point: dict[str, Any], name: str
) -> None:
    body = {"temperature": 0, "max_tokens": 12, **BODIES[name]}
    if name == FORCED:
        body |= to_the_point
    theirs = await asyncio.to_thread(
        vllm_server.chat, {"model": str(vllm_model), "return_token_ids": True, **body}
    )
    choice = theirs["choices"][0]
    ours = await ask(*body.pop("messages"), **body)
    if name == FORCED:
        assert choice["message"]["tool_calls"]
    assert ours.progress.request["prompt_digest"] == prompt_digest(theirs["prompt_token_ids"])
    assert without_call_ids(ours.answer.message) == as_ours(choice["message"])
    assert ours.answer.finish == choice["finish_reason"]
    assert ours.answer.usage.prompt_tokens == theirs["usage"]["prompt_tokens"]
    assert ours.answer.usage.completion_tokens == theirs["usage"]["completion_tokens"]
    assert rounded(ours.answer.logprobs) == rounded(choice["logprobs"])


def as_ours(message: dict[str, Any]) -> dict[str, Any]:
    """A message of vLLM's, in the names and shape that replies have."""
    message = without_call_ids(message)
    if reasoning := message.pop("reasoning", None):
        message["reasoning_content"] = reasoning
    if not message.get("content"):
        message["content"] = ""
        if "tool_calls" in message:
            del message["content"]
    return message


@pytest.mark.parametrize("name", PROMPTS)
async def test_what_follows_a_prompt_is_as_from_vllms_http_server(
    ask: Ask, vllm_server: Server, vllm_model: Path, name: str
) -> None:
    fields = {"temperature": 0, "max_tokens": 12, **PROMPTS[name]}
    body = {key: fields[key] for key in fields if key not in ("logprobs", "top_logprobs")}
    if "logprobs" in fields:
        body["logprobs"] = fields["top_logprobs"]
    theirs = await asyncio.to_thread(vllm_server.complete, {"model": str(vllm_model), **body})
    choice = theirs["choices"][0]
    ours = (await ask(**fields)).answer
    assert ours.message == {"role": "assistant", "content": choice["text"]}
    assert ours.finish == choice["finish_reason"]
    assert ours.usage.prompt_tokens == theirs["usage"]["prompt_tokens"]
    assert ours.usage.completion_tokens == theirs["usage"]["completion_tokens"]
    if "logprobs" in body:
        content = (ours.logprobs or {})["content"]
        values = [token["logprob"] for token in content]
        assert rounded(values) == rounded(choice["logprobs"]["token_logprobs"])


# Turns that are wrong


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "`tools` must be set"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens must be less than or equal"),
        ({"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "untrusted chat template"),
        ({"response_format": {"type": "nonsense"}}, "response_format.type: Input should be"),
    ],
)
async def test_what_vllm_refuses_is_an_invalid_request(
    ask: Ask, vllm_engine: VLLMEngine, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await ask("Hello", **fields)
    assert vllm_engine.running() == 0


async def test_a_template_that_raises_is_heard_in_its_own_words(ask: Ask) -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate user/assistant"):
        await ask("One", "Two")


async def test_images_are_refused_by_a_model_that_takes_none(ask: Ask) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidRequest, match="not a multimodal model"):
        await ask({"role": "user", "content": [image]})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--no-such-argument",), "unrecognized arguments: --no-such-argument"),
        (("--max-num-seqs", "many"), "argument --max-num-seqs"),
        (("--skip-tokenizer-init",), "messages need a tokenizer"),
        (("--headless",), "first node"),
        (("--model", "/no/such/model"), "/no/such/model"),
        (("--lora-modules", "a=/no/such/one"), "--lora-modules /no/such/one: there is no such"),
        (("--enable-auto-tool-choice",), "requires --tool-call-parser"),
        (("--chat-template", "/no/such/template"), "/no/such/template"),
    ],
)
def test_arguments_that_vllm_does_not_take_are_one_line(
    vllm_model: Path, arguments: tuple[str, ...], words: str
) -> None:
    settings = EngineSettings(model=str(vllm_model), arguments=(*vllm_env.ARGUMENTS, *arguments))
    with pytest.raises(UsageError) as raised:
        build(settings)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not [thread for thread in threading.enumerate() if thread.name == "vllm-engine-loop"][1:]


# Ends


async def test_a_turn_that_the_engine_aborts_itself_fails_alone(vllm_engine: VLLMEngine) -> None:
    rid, progress = new_rid(), Progress()
    asked = vllm_engine.answer(turn("Hello", **ENDLESS), rid, progress)
    task = asyncio.create_task(asked)
    await until(lambda: progress.tokens > 0)
    vllm_engine._thread.submit(vllm_engine._client.abort(f"chatcmpl-{rid}"))
    with pytest.raises(TurnError, match="abort"):
        await task
    assert await vllm_engine.healthy()


def test_life_and_death_in_a_process_of_its_own(vllm_server: Server, vllm_model: Path) -> None:
    """Another loop stalls; the death of the engine core fails every call at once; nothing is left."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engines.vllm_life", str(vllm_model), *vllm_env.ARGUMENTS],
        cwd=Path(__file__).parents[2],
        env=vllm_env.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "close": {"waiting": ["EngineDied"], "later": ["EngineDied"], "children": 0, "threads": []},
        "stalls": True,
        "death": {
            "waiting": ["EngineDied"] * 8,
            "later": ["EngineDied"],
            "healthy": "EngineDied",
            "running": 0,
            "children": 0,
        },
    }
    for complaint in ("Task was destroyed", "never retrieved", "never awaited"):
        assert complaint not in ended.stderr
