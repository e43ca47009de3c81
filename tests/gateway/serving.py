"""A gateway as a process, and how it is asked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis
from tests.processes import PATIENCE, until

from turnmill.children import parent_death_signal
from turnmill.settings import Farm


class GatewayProcess:
    """`turnmill serve` on a free port. `url`: without `/v1`."""

    def __init__(self, farm: Farm, log: Path, options: tuple[str, ...]) -> None:
        environment = {**os.environ, "REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace}
        self.log_file = log
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "turnmill", "serve", "--port", "0", *options],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=parent_death_signal(),
            )
        self.url = until(self._address, "the gateway serves")

    def _address(self) -> str:
        assert self.process.poll() is None, self.log
        found = re.search(r"serving on (http://\S+)/v1", self.log)
        return found[1] if found else ""

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


async def half_a_minute_later(redis: Redis, farm: Farm, held: list[bytes]) -> None:
    """As if nobody had waited for these turns, which are held, for that long, and gateways had looked after it."""
    await redis.zadd(farm.keys.held("sim"), dict.fromkeys(held, 1))
    await redis.set(farm.keys.tended("sim"), 1)


def chat(content: str = "Hello", **fields: Any) -> dict[str, Any]:
    """A request for a draw."""
    return {"model": "sim", "messages": [{"role": "user", "content": content}], **fields}


class Asking:
    """An OpenAI client with bare hands. `base`: up to and with `/v1`."""

    def __init__(self, base: str, key: str | None = None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(base_url=base, headers=headers, timeout=PATIENCE)

    async def post(
        self,
        body: dict[str, Any] | bytes,
        headers: dict[str, str] | None = None,
        path: str = "/chat/completions",
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=content, headers=headers)

    async def content(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> str:
        """The text of the one answer."""
        response = await self.post(body, headers)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        text = choice["message"]["content"]
        assert isinstance(text, str)
        return text

    async def chunks(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream that ends well."""
        response = await self.post(body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, in OpenAI's shape."""
    (name,) = response.json()
    assert name == "error"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error, dict)
    return error
