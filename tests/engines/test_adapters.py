"""LoRA adapters of the real engines: a worker that serves a model and two adapters, each by a name of its own, beside the
engine's own HTTP server."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engines import sglang_env, tiny_model, vllm_env
from tests.engines.own_server import ServerProcess, own_server
from tests.engines.worker_life import START_SECONDS, Workers
from tests.processes import ValkeyServer, until_async

from turnmill import Client, Reply, Turn
from turnmill.errors import UsageError
from turnmill.settings import Farm
from turnmill_worker.engines.base import EngineSettings

pytestmark = pytest.mark.timeout(500)

ADAPTERS = ("a", "b")
NAMES = ("tiny", "tiny:a", "tiny:b")
LONG = 300


@dataclass
class Kind:
    """How one engine is started with adapters, and how its own server is asked for one."""

    engine: str
    heads: int
    arguments: tuple[str, ...]
    option: str
    server: tuple[str, ...]
    environment: Callable[[], dict[str, str]]
    asked_for: Callable[[str], dict[str, Any]]


SGLANG = Kind(
    "sglang",
    4,
    (*sglang_env.ARGUMENTS, "--lora-backend", "torch_native"),
    "--lora-paths",
    ("-m", "sglang.launch_server", "--skip-server-warmup", "--served-model-name", "tiny"),
    sglang_env.environment,
    lambda name: {"model": name},
)
VLLM = Kind(
    "vllm",
    2,
    (*vllm_env.ARGUMENTS, "--enable-lora", "--max-loras", "3"),
    "--lora-modules",
    ("-m", "vllm.entrypoints.launchers.api_server.entry", "--served-model-name", "tiny"),
    vllm_env.environment,
    lambda name: {"model": name.removeprefix("tiny:")},  # an adapter is a model by its own name
)


def _param(kind: Kind) -> Any:
    missing = importlib.util.find_spec(kind.engine) is None
    marks = [
        getattr(pytest.mark, kind.engine),
        pytest.mark.skipif(missing, reason=f"{kind.engine} is not installed here"),
    ]
    return pytest.param(kind, id=kind.engine, marks=marks)


@pytest.fixture(params=[_param(SGLANG), _param(VLLM)])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def farm(own_valkey: Callable[..., ValkeyServer]) -> Farm:
    return Farm(own_valkey().url)


@pytest.fixture
def model(kind: Kind, tmp_path: Path) -> Path:
    return tiny_model.make(tmp_path / "model", heads=kind.heads, seed=7)


@pytest.fixture
def arguments(kind: Kind, tmp_path: Path) -> tuple[str, ...]:
    loaded = [
        f"{name}={tiny_model.make_adapter(tmp_path / name, heads=kind.heads, seed=seed)}"
        for seed, name in enumerate(ADAPTERS)
    ]
    return (*kind.arguments, kind.option, *loaded)


@pytest.fixture
def workers(
    kind: Kind, farm: Farm, model: Path, arguments: tuple[str, ...], tmp_path: Path
) -> Iterator[Workers]:
    environment, log = kind.environment(), tmp_path / "worker.log"
    one_by_one = Workers(kind.engine, farm, model, arguments, environment, log)
    yield one_by_one
    one_by_one.end()


@pytest.fixture
def server(
    kind: Kind, model: Path, arguments: tuple[str, ...], tmp_path: Path
) -> Iterator[ServerProcess]:
    where = "--model-path" if kind is SGLANG else "--model"
    command = [*kind.server, where, str(model), *arguments]
    with own_server(command, kind.environment(), tmp_path / "server.log") as server:
        yield server


def turn(text: str, model: str, max_tokens: int = 16, **fields: Any) -> Turn:
    sampling = {
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "repetition_penalty": 1.0,  # the model has one, and then nothing can be kept
    }
    asked = {} if "prompt" in fields else {"messages": [{"role": "user", "content": text}]}
    return Turn.model_validate({"model": model, "sampling": sampling, **asked, **fields})


async def replies(client: Client, turns: list[Turn]) -> list[Reply]:
    """Asked at once, in their order."""
    endings = await client.wait_many(await client.submit_many(turns), timeout=120)
    found = [endings[one.hash] for one in turns]
    assert all(isinstance(ending, Reply) for ending in found), found
    return [ending for ending in found if isinstance(ending, Reply)]


async def test_each_name_answers_as_the_engines_own_server_would(
    kind: Kind, farm: Farm, workers: Workers, server: ServerProcess, tmp_path: Path
) -> None:
    async with Client(farm.url) as client:
        workers.start()
        await _all_serve(client, workers)
        infos = {info.model: info for info in await client.store.workers()}
        found = {name: info.engine.adapter for name, info in infos.items()}
        assert found == {
            "tiny": None,
            "tiny:a": str(tmp_path / "a"),
            "tiny:b": str(tmp_path / "b"),
        }

        # All names in the engine at once, in batches of any mixture.
        texts = [f"How are you, miller {number}?" for number in range(6)]
        asked = [turn(text, name) for text in texts for name in NAMES]
        answers = await replies(client, asked)
        server.wait()
        for one, reply in zip(asked, answers, strict=True):
            body = one.model_dump(exclude_none=True, include={"messages"})
            body |= one.sampling.model_dump(exclude_none=True) | kind.asked_for(one.model)
            said = server.chat(body)
            assert said["choices"][0]["message"]["content"] == reply.message.content
            trace = await client.trace(one.hash)
            assert trace is not None
            assert trace.engine == infos[one.model].engine
        for start in range(0, len(asked), len(NAMES)):
            assert len({str(reply.message.content) for reply in answers[start : start + 3]}) == 3

        # A prompt without messages goes to its adapter, too.
        prompts = [turn("", name, prompt="The mill") for name in NAMES]
        assert len({str(reply.message.content) for reply in await replies(client, prompts)}) == 3

        # What one name has in the cache is of no use to another.
        shared = "The quick brown fox jumps over the lazy dog. " * 12
        for name in NAMES:
            first, again = turn(shared, name), turn(shared, name, sample=1)
            (before,), (after,) = await replies(client, [first]), await replies(client, [again])
            assert before.usage.cached_tokens < 20, name
            assert after.usage.cached_tokens > 100, name
            assert before.message == after.message


async def test_what_is_kept_of_an_adapters_answer_goes_on_in_another_worker(
    farm: Farm, workers: Workers
) -> None:
    async with Client(farm.url) as client:
        first = workers.start()
        await _all_serve(client, workers)
        long = [turn(f"long {i}", name, LONG) for i in range(8) for name in NAMES]
        waiting = await client.submit_many(long)

        async def kept() -> bool:
            keys = [f"{farm.keys.prefix}t:{hash}" for hash in waiting]
            counts = [await client.store.redis.hget(key, "kept") for key in keys]  # type: ignore[misc]
            return all(int(count or 0) >= 40 for count in counts)

        await until_async(kept, "something is kept of every answer", 100)
        first.kill()
        await client.store.redis.set(farm.keys.lease, 1000)
        for name in NAMES:  # a minute later
            leases = farm.keys.leases(name)
            await client.store.redis.zadd(leases, dict.fromkeys(waiting, 1), xx=True)
        workers.start()
        await _all_serve(client, workers)
        continued = await replies(client, long)
        at_once = await replies(client, [one.model_copy(update={"sample": 1}) for one in long])
        for one, reply, other in zip(long, continued, at_once, strict=True):
            trace = await client.trace(one.hash)
            assert trace is not None
            assert [entry.outcome for entry in trace.earlier] == ["lapse"]
            assert (trace.resumed_at or 0) >= 40
            assert reply.message == other.message
            assert reply.usage.completion_tokens == LONG


async def _all_serve(client: Client, workers: Workers) -> None:
    await workers.serves(client)
    pid = workers.started[-1].pid

    async def registered() -> bool:
        return {i.model for i in await client.store.workers() if i.pid == pid} == set(NAMES)

    await until_async(registered, "all names are served", START_SECONDS)


@pytest.mark.vllm
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed here")
def test_on_a_cpu_vllm_needs_a_place_for_no_adapter(tmp_path: Path) -> None:
    """Else the model's own answers, in a batch with an adapter's, would be made with the adapter in the last place."""
    vllm_env.prepare()
    from turnmill_worker.engines.vllm import build

    model = tiny_model.make(tmp_path / "model", heads=2)
    adapter = tiny_model.make_adapter(tmp_path / "a", heads=2)
    arguments = (*vllm_env.ARGUMENTS, "--enable-lora", "--lora-modules", f"a={adapter}")
    with pytest.raises(UsageError, match="--max-loras 1: on a CPU it must be more"):
        build(EngineSettings(model=str(model), arguments=arguments))
