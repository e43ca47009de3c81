"""What every engine must do, whatever it is. What one alone does is in a file of its own."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
from tests.engines.asking import ask, new_rid, turn, until

from turnmill.turn import Turn
from turnmill_worker.engines.base import Answer, Engine, InvalidRequest, NoRoom, Progress
from turnmill_worker.engines.kept import Part
from turnmill_worker.engines.sglang import SGLangEngine
from turnmill_worker.engines.vllm import VLLMEngine

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def endless(text: str = "Tell me of the river") -> Turn:
    """A turn that only a limit ends."""
    return turn(text, ignore_eos=True, max_tokens=10_000)


def said(message: dict[str, Any]) -> str:
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


async def prompt_tokens(engine: Engine, asked: Turn) -> int:
    progress = Progress()
    await ask(engine, asked, progress)
    tokens: int = progress.request["prompt_tokens"]
    return tokens


async def nearly_full(engine: Engine, left: int) -> str:
    """A message which leaves at least `left` tokens of the context, and few more."""
    base = await prompt_tokens(engine, turn("a" + " a" * 10, max_tokens=1))
    longer = await prompt_tokens(engine, turn("a" + " a" * 20, max_tokens=1))
    words = (engine.capacity().context - left - base) * 10 // (longer - base)
    return "a" + " a" * (10 + words)


# Answers


async def test_a_turn_is_answered(engine: Engine) -> None:
    answer = await ask(engine, turn("Say hello to the miller"))
    assert answer.message["role"] == "assistant"
    assert said(answer.message)
    assert answer.finish in ("stop", "length")
    assert answer.usage.prompt_tokens > 0
    assert 0 < answer.usage.completion_tokens <= 8
    assert answer.logprobs is None
    assert engine.running() == 0


async def test_greedy_answers_are_equal(engine: Engine) -> None:
    # The first finds no prompt in the engine's cache: its last digits may be others.
    _, first, second = [await ask(engine, turn("Why is the sky blue?")) for _ in range(3)]
    assert first.message == second.message


async def test_more_turns_than_slots_are_all_answered(engine: Engine) -> None:
    asked = [turn("grain" + " grain" * n) for n in range(engine.capacity().slots + 4)]
    alone = [await prompt_tokens(engine, each) for each in (asked[0], asked[-1])]
    together = asyncio.gather(*(ask(engine, each) for each in asked))
    await until(lambda: engine.running() > 1)
    answers = await together
    lengths = [answer.usage.prompt_tokens for answer in answers]
    assert (lengths[0], lengths[-1]) == tuple(alone)
    assert all(shorter < longer for shorter, longer in pairwise(lengths))
    assert all(said(answer.message) for answer in answers)
    assert engine.running() == 0


async def test_history_is_part_of_the_prompt(engine: Engine) -> None:
    history: list[str | dict[str, Any]] = [
        "Where is the mill?",
        {"role": "assistant", "content": "By the river."},
        "Which river?",
    ]
    first = await ask(engine, turn(*history[:1]))
    last = await ask(engine, turn(*history))
    assert last.usage.prompt_tokens > first.usage.prompt_tokens


async def test_tools_and_their_results_are_taken(engine: Engine) -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    answer = await ask(
        engine,
        turn(
            {"role": "user", "content": [{"type": "text", "text": "How is the weather in Oslo?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
            },
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "content": [{"type": "text", "text": "sunny"}],
            },
            tools=[WEATHER],
        ),
    )
    assert answer.message["role"] == "assistant"


# Prompts without a chat


def goes_on_from(prompt: str, **sampling: Any) -> Turn:
    return turn(prompt=prompt, **sampling)


async def test_a_prompt_is_gone_on_with(engine: Engine) -> None:
    progress = Progress()
    answer = await ask(engine, goes_on_from("The miller went to the", ignore_eos=True), progress)
    assert set(answer.message) == {"role", "content"}
    assert answer.message["role"] == "assistant"
    assert answer.message["content"]
    assert (answer.finish, answer.limited_by, answer.limit) == ("length", "output", 8)
    assert answer.usage.completion_tokens == progress.tokens == 8
    assert progress.request["prompt_tokens"] == answer.usage.prompt_tokens
    assert progress.request["endpoint"]


async def test_no_chat_template_is_put_around_a_prompt(engine: Engine) -> None:
    text = "The miller went to the river"
    prompt, chat = goes_on_from(text, max_tokens=1), turn(text, max_tokens=1)
    assert await prompt_tokens(engine, prompt) < await prompt_tokens(engine, chat)


async def test_a_prompt_without_room_is_refused(engine: Engine) -> None:
    progress = Progress()
    with pytest.raises(NoRoom) as refused:
        await ask(engine, goes_on_from("word " * engine.capacity().context), progress)
    assert refused.value.prompt_tokens >= refused.value.limit
    assert progress.sent is None


async def test_going_on_with_a_prompt_is_cut_to_the_room_that_is_left(engine: Engine) -> None:
    base = await prompt_tokens(engine, goes_on_from("a" + " a" * 10, max_tokens=1))
    longer = await prompt_tokens(engine, goes_on_from("a" + " a" * 20, max_tokens=1))
    words = (engine.capacity().context - 8 - base) * 10 // (longer - base)
    nearly_full = goes_on_from("a" + " a" * (10 + words), ignore_eos=True, max_tokens=100)
    answer = await ask(engine, nearly_full)
    assert (answer.finish, answer.limited_by) == ("length", "context")
    context = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.limit == context == engine.capacity().context


async def test_logprobs_beside_a_prompt_have_the_shape_of_a_chat_s(engine: Engine) -> None:
    asked = goes_on_from("The river", ignore_eos=True, max_tokens=4, logprobs=True, top_logprobs=2)
    answer = await ask(engine, asked)
    assert answer.logprobs is not None
    content = answer.logprobs["content"]
    assert len(content) == 4
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert 1 <= len(token["top_logprobs"]) <= 2
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0


# Limits


async def test_an_output_cap_is_reported(engine: Engine) -> None:
    answer = await ask(engine, turn("Tell me a story", ignore_eos=True, max_tokens=5))
    assert answer.finish == "length"
    assert (answer.limited_by, answer.limit) == ("output", 5)
    assert answer.usage.completion_tokens == 5


async def test_a_prompt_without_room_never_reaches_the_engine(engine: Engine) -> None:
    progress = Progress()
    with pytest.raises(NoRoom) as refused:
        await ask(engine, turn("word " * engine.capacity().context), progress)
    assert refused.value.prompt_tokens >= refused.value.limit
    assert 0 < refused.value.limit <= engine.capacity().context
    assert progress.sent is None
    assert engine.running() == 0


async def test_an_answer_is_cut_to_the_room_that_is_left(engine: Engine) -> None:
    context = engine.capacity().context
    answer = await ask(
        engine, turn(await nearly_full(engine, left=8), ignore_eos=True, max_tokens=100)
    )
    assert answer.finish == "length"
    assert (answer.limited_by, answer.limit) == ("context", context)
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == context


async def test_without_max_tokens_the_context_is_the_limit(engine: Engine) -> None:
    asked = turn(await nearly_full(engine, left=8), ignore_eos=True, max_tokens=None)
    answer = await ask(engine, asked)
    assert (answer.finish, answer.limited_by) == ("length", "context")


async def test_a_stop_string_ends_an_answer_and_is_not_in_it(engine: Engine) -> None:
    asked = "The miller and the river"
    long = turn(asked, ignore_eos=True, max_tokens=24)
    await ask(engine, long)  # as for greedy answers
    whole = said((await ask(engine, long)).message)
    stop = whole[len(whole) // 2 :][:3]
    answer = await ask(engine, turn(asked, ignore_eos=True, max_tokens=24, stop=[stop]))
    assert answer.finish == "stop"
    assert answer.limited_by is None
    assert said(answer.message) == whole[: whole.index(stop)]


async def test_logprobs_have_openais_shape(engine: Engine) -> None:
    asked = turn("Say hello", ignore_eos=True, max_tokens=4, logprobs=True, top_logprobs=2)
    answer = await ask(engine, asked)
    assert answer.logprobs is not None
    content = answer.logprobs["content"]
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(token["top_logprobs"]) == 2
        for entry in (token, *token["top_logprobs"]):
            assert isinstance(entry["token"], str)
            assert entry["logprob"] <= 0
            assert entry["bytes"] is None or all(0 <= byte < 256 for byte in entry["bytes"])
        best, second = (entry["logprob"] for entry in token["top_logprobs"])
        assert token["logprob"] == best >= second


async def test_a_wrong_turn_is_refused_as_such(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"type|response_format"):
        await ask(engine, turn("Say hello", response_format={"type": "nonsense"}))
    assert engine.running() == 0


# Cancelling


async def test_a_cancelled_turn_leaves_the_engine(engine: Engine) -> None:
    progress = Progress()
    task = asyncio.create_task(ask(engine, endless(), progress))
    await until(lambda: progress.tokens)
    assert engine.running() == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.running() == 0)
    assert (await ask(engine, turn("Say hello"))).message


async def test_turns_that_still_wait_can_be_cancelled(engine: Engine) -> None:
    count = engine.capacity().slots + 2
    tasks = [asyncio.create_task(ask(engine, endless())) for _ in range(count)]
    await until(lambda: engine.running() == count)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    await until(lambda: engine.running() == 0)
    assert (await ask(engine, turn("Say hello"))).message


async def test_abort_ends_a_turn(engine: Engine) -> None:
    progress, rid = Progress(), new_rid()
    task = asyncio.create_task(engine.answer(endless(), rid, progress))
    await until(lambda: progress.tokens)
    await engine.abort(rid)
    await asyncio.wait({task})
    assert task.cancelled() or task.result().message
    await until(lambda: engine.running() == 0)


async def test_aborting_an_unknown_turn_does_nothing(engine: Engine) -> None:
    await engine.abort(new_rid())
    assert await engine.healthy()


# What an engine says of itself


def test_identity_is_complete(engine: Engine) -> None:
    identity = engine.identity
    assert all((identity.engine, identity.version, identity.model))
    assert identity.dtype or identity.engine == "openai"  # not every server says it
    assert engine.served_name


async def test_capacity_is_constant(engine: Engine) -> None:
    before = engine.capacity()
    assert before.slots >= 1
    assert before.context >= 2
    assert before.kv_tokens is None or before.kv_tokens >= before.context
    await ask(engine, turn("Say hello"))
    assert engine.capacity() == before


async def test_a_working_engine_is_healthy(engine: Engine) -> None:
    assert await engine.healthy()


async def test_the_request_is_described(engine: Engine) -> None:
    described = [Progress() for _ in range(3)]
    for text, progress in zip(("one", "one", "two"), described, strict=True):
        answer = await ask(engine, turn(text, top_p=0.5), progress)
        assert set(progress.request) == {"endpoint", "prompt_tokens", "prompt_digest", "sampling"}
        assert progress.request["prompt_tokens"] == answer.usage.prompt_tokens
        assert progress.request["sampling"]["top_p"] == 0.5
    one, same, other = (progress.request["prompt_digest"] for progress in described)
    assert one == same != other


async def test_progress_is_told_in_order(engine: Engine) -> None:
    progress, before = Progress(), time.time()
    answer = await ask(engine, turn("Say hello"), progress)
    stages = (progress.rendered, progress.sent, progress.first_token, progress.last_token)
    rendered, sent, first_token, last_token = (at or 0 for at in stages)
    assert before <= rendered <= sent <= first_token <= last_token <= time.time()
    assert progress.tokens == answer.usage.completion_tokens


# Going on from what an earlier try has kept

LONG = {"ignore_eos": True, "max_tokens": 100, "repetition_penalty": 1.0}
"""The penalty, because a model may have one of its own; see generation_config.json."""

KEEP_NOTHING = {"xllamacpp", "openai"}

VARIANTS = [
    pytest.param({}, id="plain"),
    pytest.param({"prompt": "The miller went to the"}, id="prompt"),
    pytest.param({"logprobs": True, "top_logprobs": 2}, id="logprobs"),
]


async def unfinished(engine: Engine, asked: Turn, least: int) -> Part:
    """What could be kept of an answer when it had `least` tokens, and was ended."""
    if engine.identity.engine in KEEP_NOTHING:
        pytest.skip("nothing is kept of this engine's answers")
    progress = Progress()
    task = asyncio.create_task(ask(engine, asked, progress))
    await until(lambda: progress.tokens >= least or task.done())
    assert not task.done(), "it was too quick"
    assert progress.growing is not None
    part = progress.growing(0)
    task.cancel()
    await asyncio.wait({task})
    return part


def as_one(answer: Answer) -> tuple[Any, ...]:
    """What must be equal, however an answer was made: all but the engine's use of its cache, and the last
    digits of its numbers."""
    usage = answer.usage.model_copy(update={"cached_tokens": 0})
    probabilities = [
        (entry["token"], entry["bytes"], pytest.approx(entry["logprob"], abs=1e-3))
        for token in (answer.logprobs or {}).get("content", ())
        for entry in (token, *token["top_logprobs"])
    ]
    return answer.message, answer.finish, answer.limited_by, answer.limit, usage, probabilities


@pytest.mark.parametrize("fields", VARIANTS)
async def test_an_answer_goes_on_as_if_it_had_been_made_at_once(
    engine: Engine, fields: dict[str, Any]
) -> None:
    messages = () if "prompt" in fields else ("Tell me of the river",)
    asked = turn(*messages, **LONG, **fields)
    whole = await ask(engine, asked)
    part = await unfinished(engine, asked, least=40)
    progress = Progress(kept=[part])
    answer = await ask(engine, asked, progress)
    assert 0 < progress.resumed_at <= part.length
    assert progress.tokens == 100
    assert as_one(answer) == as_one(whole)
    assert progress.growing is not None
    again = progress.growing(0)  # what was taken over is kept again by whoever starts anew
    assert again.length >= progress.resumed_at


async def test_a_stop_string_is_found_where_an_answer_goes_on(engine: Engine) -> None:
    asked = turn("Tell me of the river", **LONG)
    part = await unfinished(engine, asked, least=40)
    whole = said((await ask(engine, asked)).message)
    stop = whole[len(whole) * 3 // 4 :][:6]
    stopped = turn("Tell me of the river", **LONG, stop=[stop])
    if stop in whole[: len(whole) // 2]:
        pytest.skip("the answer repeats itself")
    answer = await ask(engine, stopped, Progress(kept=[part]))
    assert answer.finish == "stop"
    assert said(answer.message) == whole[: whole.index(stop)]


async def test_a_turn_that_may_not_go_on_starts_again(engine: Engine) -> None:
    part = await unfinished(engine, turn("the river", **LONG), least=40)
    progress = Progress(kept=[part])
    asked = turn("the river", ignore_eos=True, max_tokens=5, frequency_penalty=0.5)
    answer = await ask(engine, asked, progress)
    assert progress.resumed_at == 0
    assert progress.growing is None
    assert answer.usage.completion_tokens == 5


# What readers are told of an answer that grows


def told_of(progress: Progress) -> str:
    assert progress.telling is not None
    return progress.telling(0)


async def read_along(engine: Engine, asked: Turn) -> tuple[Answer, list[tuple[str, Part]]]:
    """An answer; and, whenever there was more of it to read, what had been read and what could be kept by then."""
    progress = Progress(streamed=True)
    task = asyncio.create_task(ask(engine, asked, progress))
    await until(lambda: progress.sent or task.done())
    assert progress.telling is not None
    assert progress.growing is not None
    text, seen = "", list[tuple[str, Part]]()
    while not task.done():
        if new := progress.telling(len(text)):
            text += new
            seen.append((text, progress.growing(0)))
        await asyncio.sleep(0.001)
    return await task, seen


@pytest.fixture
def plain(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine, as it is where it may tell of its answers."""
    if engine.identity.engine in KEEP_NOTHING:
        pytest.skip("nothing is told of this engine's answers")
    if isinstance(engine, SGLangEngine):
        monkeypatch.setattr(engine._chat, "reasoning_parser", None)
    if isinstance(engine, VLLMEngine):
        monkeypatch.setattr(engine._chat, "parser_cls", None)
    return engine


WORDS = " ".join(f"ö{number}" if number % 6 else f"{number}水👩‍🌾" for number in range(40))
"""What the scripted engine says: no part of it comes twice, and some characters are of several tokens for others."""


async def goes_on(engine: Engine, asked: Turn, part: Part, text: str) -> Answer:
    """The answer of a try that goes on from a part, and at once tells what was told."""
    progress = Progress(kept=[part], streamed=True)
    task = asyncio.create_task(ask(engine, asked, progress))
    await until(lambda: progress.sent or task.done())
    assert told_of(progress).startswith(text)
    return await task


async def test_what_is_told_is_true_of_the_answer_and_of_one_that_goes_on(plain: Engine) -> None:
    asked = turn(WORDS, **LONG)
    answer, seen = await read_along(plain, asked)
    content = str(answer.message["content"])
    assert len(seen) > 5
    assert all(content.startswith(text) for text, _ in seen)
    assert len(seen[-1][0]) > len(content) // 2
    for text, part in seen[1 : -1 : max(1, len(seen) // 4)]:
        assert as_one(await goes_on(plain, asked, part, text)) == as_one(answer)


async def test_no_beginning_of_a_stop_string_is_told(plain: Engine) -> None:
    whole = str((await ask(plain, turn(WORDS, **LONG))).message["content"])
    new = (at for at in range(len(whole) // 3, len(whole)) if whole.index(whole[at:][:7]) == at)
    if (start := next(new, None)) is None:
        pytest.skip("the answer repeats itself")
    never = "\N{OGONEK}"
    stops = [whole[start:][:7], whole[start - 9 :][:3] + never, whole[start // 2 :][:3] + never]
    asked = turn(WORDS, **LONG, stop=stops)
    answer, seen = await read_along(plain, asked)
    assert answer.finish == "stop"
    assert answer.message["content"] == whole[:start]
    assert seen
    for text, _ in seen:
        assert whole[:start].startswith(text)
        assert not any(text.endswith(stop[:n]) for stop in stops for n in range(1, len(stop)))
    text, part = seen[-1]
    assert as_one(await goes_on(plain, asked, part, text)) == as_one(answer)


@pytest.mark.parametrize(
    "fields",
    [{"seed": 7}, {"frequency_penalty": 0.5}, {"tools": [WEATHER]}],
    ids=["seed", "penalty", "tools"],
)
async def test_nothing_is_told_of_what_may_not_go_on_or_become_a_call(
    plain: Engine, fields: dict[str, Any]
) -> None:
    progress = Progress(streamed=True)
    await ask(plain, turn("Say hello", **fields), progress)
    assert progress.telling is None
