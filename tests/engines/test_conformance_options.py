"""What the engines with a chat layer of their own do with what a turn asks beside its messages, both alike."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.engines.asking import ask, turn
from tests.engines.bodies import WEATHER
from tests.engines.conftest import ENGINES

from turnmill_worker.engines.base import Engine, Progress
from turnmill_worker.engines.identity import prompt_digest
from turnmill_worker.engines.sglang import SGLangEngine
from turnmill_worker.engines.vllm import VLLMEngine


@pytest.fixture(scope="session", params=[one for one in ENGINES if one.id in ("sglang", "vllm")])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def tokenizer(engine: Engine) -> Any:
    if isinstance(engine, SGLangEngine):
        return engine._manager.tokenizer
    assert isinstance(engine, VLLMEngine)
    return engine._client.renderer.tokenizer


@pytest.fixture
def to_the_point(tokenizer: Any) -> dict[str, Any]:
    """Sampling with which noise, made to say JSON, neither fills it with white space nor goes on."""
    spaces = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()]
    bias = {str(token): -50.0 for token in spaces} | {str(tokenizer.eos_token_id): 50.0}
    return {"max_tokens": 100, "logit_bias": bias}


NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
DRAWN = {"temperature": 1, "top_p": 1, "top_k": -1, "max_tokens": 24, "ignore_eos": True}
"""As the model has it, whatever its generation config says."""


def said(message: dict[str, Any]) -> str:
    return (message.get("reasoning_content") or "") + (message.get("content") or "")


# Parsers


def test_parsers_are_chosen_by_the_chat_template(engine: Engine) -> None:
    tools = "qwen" if engine.identity.engine == "sglang" else "hermes"
    assert (engine.identity.tool_parser, engine.identity.reasoning_parser) == (tools, "qwen3")
    assert f"tool calls by {tools}, reasoning by qwen3" in str(engine.identity)


# Grammars


TIDES = {"type": "function", "function": {"name": "tides", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("tools", "choice"), [([WEATHER], "required"), ([TIDES, WEATHER], NAMED)], ids=["any", "named"]
)
async def test_a_call_that_must_be_made_is_made_by_grammar(
    engine: Engine, to_the_point: dict[str, Any], tools: list[dict[str, Any]], choice: Any
) -> None:
    asking = {"tools": tools, "tool_choice": choice, **NO_THINKING, **to_the_point}
    first, second = [await ask(engine, turn("Weather?", **asking)) for _ in range(2)]
    assert first.message == second.message
    # A function by its name: to OpenAI's API, and to vLLM, that is no choice, and ends as any text does.
    as_openai = choice is NAMED and engine.identity.engine == "vllm"
    assert first.finish == ("stop" if as_openai else "tool_calls")
    (call,) = first.message["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    assert call["id"].startswith("call_")
    (elsewhere,) = (await ask(engine, turn("The weather?", **asking))).message["tool_calls"]
    assert elsewhere["id"] != call["id"]


async def test_json_schemas_are_kept_to(engine: Engine, to_the_point: dict[str, Any]) -> None:
    schema = WEATHER["function"]["parameters"]
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    asked = turn("City?", response_format=wanted, **NO_THINKING, **to_the_point)
    progress = Progress()
    answer = await ask(engine, asked, progress)
    assert json.loads(answer.message["content"]) == {"city": "Oslo"}
    assert answer.finish == "stop"
    assert progress.growing is None


# Sampling


async def test_a_bias_forces_tokens_and_bans_them(engine: Engine, tokenizer: Any) -> None:
    async def letters(**biased: float) -> set[str]:
        bias = {str(id): by for letter, by in biased.items() for id in tokenizer.encode(letter)}
        return set(said((await ask(engine, turn("Hello", **DRAWN, logit_bias=bias))).message))

    assert not await letters() <= {"Y", "Z"}
    assert await letters(Z=100) == {"Z"}
    assert await letters(Y=50, Z=50) == {"Y", "Z"}
    assert await letters(Y=50, Z=-100) == {"Y"}


@pytest.mark.parametrize("top", [0, 1, 5, 20])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_as_many_top_logprobs_as_are_asked_for_the_best_first(
    engine: Engine, top: int, temperature: float
) -> None:
    fields = {**DRAWN, "temperature": temperature, "max_tokens": 5}
    answer = await ask(engine, turn("Hello", logprobs=True, top_logprobs=top, **fields))
    assert answer.logprobs is not None
    content = answer.logprobs["content"]
    assert len(content) == 5
    for token in content:
        values = [entry["logprob"] for entry in token["top_logprobs"]]
        assert len(values) == top
        if temperature == 0 or engine.identity.engine == "vllm":
            assert values[:1] == [token["logprob"]][:top]
        if temperature and engine.identity.engine == "vllm":
            values = values[1:]  # what was drawn comes first, and is one of them
        assert values == sorted(values, reverse=True)


async def test_samples_of_one_turn_are_draws_of_their_own(engine: Engine) -> None:
    asked = [turn("Draw", sample=sample, **DRAWN) for sample in range(3)]
    answers = await asyncio.gather(*(ask(engine, each) for each in asked))
    assert len({said(answer.message) for answer in answers}) == 3


# Templates


async def test_what_a_turn_tells_the_template_is_in_its_prompt(
    engine: Engine, tokenizer: Any
) -> None:
    digests = []
    for fields in ({}, NO_THINKING):
        progress = Progress()
        await ask(engine, turn("Hello", max_tokens=1, **fields), progress)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello"}],
            add_generation_prompt=True,
            return_dict=False,
            **fields.get("chat_template_kwargs", {}),
        )
        digests.append(progress.request["prompt_digest"])
        assert digests[-1] == prompt_digest(prompt)
    assert digests[0] != digests[1]
