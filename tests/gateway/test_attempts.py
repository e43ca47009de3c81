"""Memory: which draw an ask is, what a restarted client gets, who joins whose turn, and who hangs up.

The engine's answers are chains whose first token is random: equal texts are one draw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from redis.asyncio import Redis
from tests.gateway.serving import Asking, GatewayProcess, chat, error_of, half_a_minute_later
from tests.processes import SimWorker, until_async

from turnmill.queue import Queue
from turnmill.settings import Farm
from turnmill.store import RunInfo, Store

Serve = Callable[..., GatewayProcess]
MakeAsking = Callable[..., Asking]
WorkerFactory = Callable[..., SimWorker]

CHAIN = ("--answer", "chain", "--answer-tokens", "6")
RETRY = {"x-stainless-retry-count": "1"}


def attempt(base: str, id: str, run: str = "run") -> str:
    return f"{base}/runs/{run}/attempts/{id}/v1"


async def counters(redis: Redis, farm: Farm, run: str) -> RunInfo:
    for info in await Store(redis, farm.keys).runs():
        if info.name == run:
            return info
    return RunInfo(name=run)


async def leave_waiting(
    client: Asking,
    body: dict[str, Any],
    until: Callable[[], Any],
    headers: dict[str, str] | None = None,
) -> None:
    """Ask, and hang up as soon as `until` says that the turn is there."""
    task = asyncio.ensure_future(client.post(body, headers))
    await until_async(until, "the turn is in the queue")
    task.cancel()
    await asyncio.wait([task])


async def test_an_attempt_draws_and_the_next_finds_these_draws(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker(sim=CHAIN)
    base = serve("--insecure").url
    first = asking(attempt(base, "1"))
    drawn = [await first.content(chat()) for _ in range(3)]
    assert len(set(drawn)) == 3, "each ask is a draw of its own"
    second = asking(attempt(base, "2"))
    assert [await second.content(chat()) for _ in range(3)] == drawn
    assert await second.content(chat()) not in drawn
    assert (await asking(base).http.get("/runs/run/attempts/2")).json() == {
        "run": "run",
        "attempt": "2",
        "stored": 3,
        "made": 1,
        "capped_output": 0,
        "capped_context": 0,
        "failed": 0,
    }
    other = [await asking(attempt(base, "1", "other")).content(chat()) for _ in range(3)]
    assert not set(other) & set(drawn), "draws of two runs are never merged"


async def test_many_equal_asks_at_once_are_so_many_draws(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker(sim=(*CHAIN, "--latency", "0.05"))
    gateways = [serve("--insecure"), serve("--insecure")]
    clients = [asking(attempt(gateway.url, "1")) for gateway in gateways]
    drawn = await asyncio.gather(*(clients[i % 2].content(chat()) for i in range(30)))
    assert len(set(drawn)) == 30
    again = asking(attempt(gateways[0].url, "2"))
    assert set(await asyncio.gather(*(again.content(chat()) for _ in range(30)))) == set(drawn)


async def test_choices_and_streams_count_too(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker(sim=CHAIN)
    base = serve("--insecure").url

    async def drawn(id: str) -> list[str]:
        client = asking(attempt(base, id))
        choices = (await client.post(chat(n=2))).json()["choices"]
        chunks = await client.chunks(chat())
        streamed = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        return [*(choice["message"]["content"] for choice in choices), streamed]

    first = await drawn("1")
    assert len(set(first)) == 3
    assert sorted(await drawn("2")) == sorted(first)


async def test_headers_name_an_attempt(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker(sim=CHAIN)
    base = serve("--insecure").url
    headers = {"X-Turnmill-Run": "run", "X-Turnmill-Attempt": "1"}
    drawn = await asking(f"{base}/v1").content(chat(), headers)
    assert await asking(attempt(base, "2")).content(chat()) == drawn
    response = await asking(f"{base}/v1").post(chat(), {"X-Turnmill-Attempt": "1"})
    assert response.status_code == 400
    response = await asking(attempt(base, "a b")).post(chat())
    assert error_of(response)["code"] == "bad_name"


async def test_without_an_attempt_every_draw_is_new(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking
) -> None:
    worker(sim=CHAIN)
    base = serve("--insecure").url
    for client in (asking(f"{base}/v1"), asking(f"{base}/runs/run/v1")):
        assert len({await client.content(chat()) for _ in range(4)}) == 4


@pytest.mark.parametrize("shared", [{"temperature": 0}, {"seed": 5}])
async def test_greedy_and_seeded_turns_are_shared(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, shared: dict[str, Any]
) -> None:
    worker(sim=CHAIN)
    base = serve("--insecure").url
    asked = [asking(f"{base}/v1"), asking(attempt(base, "1")), asking(attempt(base, "1", "b"))]
    assert len({await client.content(chat(**shared)) for client in asked * 2}) == 1


async def test_a_retry_takes_the_turn_that_was_left(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, client: Redis, farm: Farm
) -> None:
    worker(sim=(*CHAIN, "--latency", "1"))
    base = serve("--insecure").url
    queue = Queue(client, farm.keys)

    async def running() -> bool:
        return (await queue.depth("sim")).running == 1

    for url, run in ((attempt(base, "1"), "run"), (f"{base}/v1", "adhoc")):
        asked = asking(url)
        await leave_waiting(asked, chat(), running)
        await asked.content(chat(), RETRY)
        assert (await counters(client, farm, run)).total == 1, "the retry joined"
        await asked.content(chat(), RETRY)
        assert (await counters(client, farm, run)).total == 2, "nothing was left to join"


async def test_in_an_attempt_the_next_takes_the_turn_that_was_left(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, client: Redis, farm: Farm
) -> None:
    """Most clients have a way to try again that says nothing of it."""
    worker(sim=(*CHAIN, "--latency", "0.5"))
    base = serve("--insecure").url
    asked = asking(attempt(base, "1"))

    async def there() -> bool:
        return (await counters(client, farm, "run")).total == 1

    async def left() -> bool:
        (open,) = [key async for key in client.scan_iter(f"{farm.namespace}:open:*")]
        return any(owner.startswith(b"-") for owner in await client.hkeys(open))

    await leave_waiting(asked, chat(), there)
    await until_async(left, "the turn is left")
    drawn = [await asked.content(chat()) for _ in range(2)]
    assert len(set(drawn)) == 2
    assert (await counters(client, farm, "run")).total == 2, "the first of them joined"
    second = asking(attempt(base, "2"))
    assert {await second.content(chat()) for _ in range(2)} == set(drawn)


async def test_what_has_a_name_is_left_to_its_name(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, client: Redis, farm: Farm
) -> None:
    worker(sim=(*CHAIN, "--latency", "0.5"))
    base = serve("--insecure").url
    asked = asking(attempt(base, "1"))
    named = {"Idempotency-Key": "mine"}

    async def there() -> bool:
        return (await counters(client, farm, "run")).total == 1

    async def left() -> bool:
        text = (await asking(base).http.get("/metrics")).text
        return "turnmill_gateway_hang_ups_total 1" in text

    await leave_waiting(asked, chat(), there, named)
    await until_async(left, "the hang-up is noticed")
    others = [await asked.content(chat(), headers) for headers in (None, RETRY)]
    assert await asked.content(chat(), named) not in others
    assert (await counters(client, farm, "run")).total == 3


async def test_a_retry_never_gets_what_somebody_else_got(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, client: Redis, farm: Farm
) -> None:
    """It takes the turn of one who waits still, who is given another draw."""
    worker(sim=(*CHAIN, "--latency", "0.5"))
    asked = asking(attempt(serve("--insecure").url, "1"))
    waiting = asyncio.ensure_future(asked.content(chat()))

    async def there() -> bool:
        return (await counters(client, farm, "run")).total == 1

    await until_async(there, "the turn is in the queue")
    retried = await asked.content(chat(), RETRY)
    assert await waiting != retried
    assert (await counters(client, farm, "run")).total == 2


async def test_idempotency_keys(serve: Serve, worker: WorkerFactory, asking: MakeAsking) -> None:
    worker(sim=CHAIN)
    gateways = [serve("--insecure"), serve("--insecure")]
    named = {"Idempotency-Key": "mine"}
    for path in ("/v1", "/runs/run/attempts/1/v1"):
        clients = [asking(gateway.url + path) for gateway in gateways]
        pair = await asyncio.gather(*(client.content(chat(), named) for client in clients))
        pair += [await client.content(chat(), named) for client in clients]
        assert len(set(pair)) == 1
        assert await clients[0].content(chat(), {"Idempotency-Key": "other"}) not in pair
        response = await clients[0].post(chat("other"), named)
        assert error_of(response)["code"] == "idempotency_key_reused"


async def test_who_hangs_up_leaves_an_orphan_that_is_cancelled(
    serve: Serve,
    worker: WorkerFactory,
    asking: MakeAsking,
    client: Redis,
    farm: Farm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outside a run; what was asked under a run's URL goes on."""
    worker(lease=0.5, sim=("--hang-if", "stuck"))
    base = serve("--insecure").url
    queue = Queue(client, farm.keys)

    async def running(count: int) -> bool:
        return (await queue.depth("sim")).running == count

    await leave_waiting(asking(f"{base}/v1"), chat("stuck"), lambda: running(1))
    await leave_waiting(asking(f"{base}/runs/run/v1"), chat("stuck"), lambda: running(2))
    held = await client.zrange(farm.keys.held("sim"), 0, -1)
    assert len(held) == 1
    await half_a_minute_later(client, farm, held)
    await until_async(lambda: running(1), "the orphan is cancelled")
    assert (await counters(client, farm, "adhoc")).cancelled == 1
    assert (await counters(client, farm, "run")).cancelled == 0
    assert not await client.exists(farm.keys.held("sim"))


async def test_answers_outside_a_run_are_let_go_after_a_while(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, client: Redis, farm: Farm
) -> None:
    worker()
    base = serve("--insecure", "--keep", "1s").url
    await asking(f"{base}/v1").post(chat("for nobody"))
    await asking(attempt(base, "1")).post(chat("for a run"))

    async def gone() -> bool:
        return (await counters(client, farm, "adhoc")).total == 0

    async def replies() -> int:
        return len([key async for key in client.scan_iter(farm.keys.reply("*"))])

    await until_async(gone, "the answer is let go", 60)
    assert await replies() == 1
    assert (await counters(client, farm, "run")).total == 1


async def test_a_cancelled_run_goes_on_with_a_new_attempt(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any
) -> None:
    worker(lease=0.5, sim=("--hang-if", "stuck"))
    base = serve("--insecure").url
    first = asking(attempt(base, "1"))
    waiting = asyncio.ensure_future(first.post(chat("stuck")))
    assert await first.content(chat("fine")) == "fine"
    await asyncio.to_thread(on_farm, "cancel", "run")
    for response in (await waiting, await first.post(chat("more"))):
        assert error_of(response)["code"] == "cancelled"
        assert response.headers["x-should-retry"] == "false"
    assert await asking(attempt(base, "2")).content(chat("more")) == "more"
    assert error_of(await first.post(chat("more")))["code"] == "cancelled", "its time is over"


async def test_forgetting_a_run_forgets_its_attempts(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, on_farm: Any, client: Redis, farm: Farm
) -> None:
    worker()
    await asking(attempt(serve("--insecure").url, "1")).content(chat())

    async def left() -> list[str]:
        keys = [key.decode() async for key in client.scan_iter(f"{farm.namespace}:*")]
        return [key for key in keys if ":run:" in key or key.endswith(":run")]

    assert farm.keys.attempts("run") in await left()
    await asyncio.to_thread(on_farm, "forget", "run", "--yes")
    assert await left() == []


@pytest.mark.parametrize("count", ["", "-1", "1e9", "\N{SUPERSCRIPT TWO}".encode(), "9" * 5000])
async def test_a_count_of_retries_may_be_anything(
    serve: Serve, worker: WorkerFactory, asking: MakeAsking, count: Any
) -> None:
    worker()
    client = asking(f"{serve('--insecure').url}/v1")
    assert await client.content(chat("any"), {"x-stainless-retry-count": count}) == "any"
