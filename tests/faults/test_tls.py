"""TLS with Debian's redis-server: the embedded server has none.

The server is the one on the PATH, or that which TURNMILL_REDIS_SERVER names.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.faults.aftermath import HASHING, Asked, all_is_well, turns
from tests.processes import SimWorker, ValkeyServer, until

from turnmill.client import Client
from turnmill.errors import RedisAway
from turnmill.settings import Farm

pytestmark = pytest.mark.faults


@dataclass(frozen=True)
class Papers:
    """A certificate with its key, both by their files."""

    certificate: Path
    key: Path


class Authority:
    """It signs for 127.0.0.1, and for clients."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._own = Papers(folder / f"{name}.crt", folder / f"{name}.key")
        _openssl("req", "-x509", "-subj", f"/CN={name}", *_new_key(self._own))
        self.certificate = self._own.certificate

    def sign(self, name: str) -> Papers:
        papers = Papers(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        signed_by = ("-CA", str(self._own.certificate), "-CAkey", str(self._own.key))
        address = ("-addext", "subjectAltName=IP:127.0.0.1")
        _openssl("req", "-x509", "-subj", f"/CN={name}", *address, *signed_by, *_new_key(papers))
        return papers


def _new_key(papers: Papers) -> tuple[str, ...]:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    return (*curve, "-keyout", str(papers.key), "-out", str(papers.certificate))


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def redis_server() -> Path:
    found = os.environ.get("TURNMILL_REDIS_SERVER") or shutil.which("redis-server")
    if not found:
        pytest.skip("no redis-server: install Debian's, or name one in TURNMILL_REDIS_SERVER")
    if not shutil.which("openssl"):
        pytest.skip("no openssl, which makes the certificates")
    return Path(found)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("papers"), "authority")


@pytest.fixture
def tls_server(
    redis_server: Path, authority: Authority, own_valkey: Callable[..., ValkeyServer]
) -> tuple[ValkeyServer, str]:
    """Debian's server, and its URL with TLS. It wants a certificate from its clients, too."""
    own, clients = authority.sign("server"), authority.sign("client")
    port = _free_port()
    server = own_valkey(
        binary=redis_server,
        tls_port=str(port),
        tls_cert_file=str(own.certificate),
        tls_key_file=str(own.key),
        tls_ca_cert_file=str(authority.certificate),
    )
    papers = f"ssl_certfile={clients.certificate}&ssl_keyfile={clients.key}"
    return server, f"rediss://127.0.0.1:{port}?{papers}&ssl_ca_certs={authority.certificate}"


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


async def test_turns_and_faults_over_tls(
    worker: Callable[..., SimWorker], tls_server: tuple[ValkeyServer, str]
) -> None:
    server, url = tls_server
    one = worker("--slots", "20", sim=("--latency", "0.1", *HASHING), farm=Farm(url))
    async with Client(url, run="run", patience=None, poll_seconds=0.5) as client:
        asked = Asked(client, turns(400))
        await asked.until_ended(100)
        server.kill()
        server.start()
        await asked.until_ended(250)
        await client.store.redis.client_kill_filter(_type="normal", skipme=True)
        await asked.end_right()
        await all_is_well(client, asked.turns)
    one.signal(signal.SIGTERM)
    assert one.wait() == 0


async def test_a_server_that_somebody_else_has_signed_for_is_not_believed(
    worker: Callable[..., SimWorker], tls_server: tuple[ValkeyServer, str], tmp_path: Path
) -> None:
    _, url = tls_server
    other = Authority(tmp_path, "other").certificate
    strict = f"{url.partition('ssl_ca_certs=')[0]}ssl_ca_certs={other}"
    one = worker(farm=Farm(strict), registers=False)
    until(lambda: "certificate verify failed" in one.log, "it says why")
    assert one.process.poll() is None
    with pytest.raises(RedisAway, match="certificate verify failed"):
        async with Client(strict, patience=0.1) as client:
            await client.submit(turns(1)[0])
