"""`turnmill doctor`: each fault is made, and found, with what to do about it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from tests.by_hand import ByHand, h
from tests.processes import SimWorker, ValkeyServer

from turnmill.doctor import Check, machine, server
from turnmill.doctor import farm as of_farm
from turnmill.embedded import EmbeddedServer, running_server
from turnmill.settings import Farm
from turnmill.store import WorkerInfo

ROOT = Path(__file__).parents[2]
Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Runs the command in a folder of its own. Its checks by name, after a look at its exit code."""

    def run(*arguments: str, farm: Farm | None = None, exits: int = 0, **more: str) -> Any:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("REDIS_URL", "TURNMILL_NAMESPACE")
        }
        if farm:
            environment |= {"REDIS_URL": farm.url, "TURNMILL_NAMESPACE": farm.namespace}
        done = subprocess.run(
            [sys.executable, "-m", "turnmill", "doctor", *arguments, "--json"],
            cwd=tmp_path,
            env=environment | {"TURNMILL_DATA": str(tmp_path / "data")} | more,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == exits, done.stdout + done.stderr
        report = json.loads(done.stdout)
        checks = {check["name"]: check for check in report["checks"]}
        states = [check["state"] for check in report["checks"]]
        assert len(checks) == len(states), "each name is there once"
        assert (report["bad"], report["warn"]) == (states.count("bad"), states.count("warn"))
        assert all(bool(check["advice"]) == (check["state"] != "ok") for check in checks.values())
        assert not any("\n" in check["says"] + check["advice"] for check in checks.values())
        return checks

    return run


# The command


def test_a_farm_that_is_well(doctor: Doctor, own_valkey: Callable[..., ValkeyServer]) -> None:
    checks = doctor(farm=Farm(own_valkey(maxmemory="1gb").url))
    assert {check["state"] for name, check in checks.items() if not name.endswith("disk")} == {"ok"}
    assert checks["server"]["says"].startswith("Valkey ")


def test_people_get_a_line_a_check(doctor: Doctor, valkey: ValkeyServer, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "turnmill", "doctor", "--model", "/none", "--redis-url", valkey.url],
        capture_output=True,
        cwd=tmp_path,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if re.match(r"bad   model +/none does not", line))
    assert re.match(r" +→ correct the path", lines[at + 1])
    assert re.match(r"1 bad", lines[-1])


def test_a_redis_that_is_away_is_exit_3_and_the_machine_is_looked_at_all_the_same(
    doctor: Doctor,
) -> None:
    checks = doctor(farm=Farm("redis://me:secret@127.0.0.1:1/0?password=secret"), exits=3)
    assert checks["redis"]["state"] == "bad"
    assert "redis://me:***@127.0.0.1:1/0?password=*** cannot be reached" in checks["redis"]["says"]
    assert "secret" not in str(checks)
    assert "packages" in checks
    assert "memory" not in checks


def test_a_wrong_password_is_exit_3(
    doctor: Doctor, own_valkey: Callable[..., ValkeyServer]
) -> None:
    farm = Farm(f"{own_valkey(requirepass='right').url}?password=wrong")
    found = doctor(farm=farm, exits=3)["redis"]
    assert "refuses" in found["says"]
    assert "password" in found["advice"]


def test_a_url_that_is_none_is_exit_2(valkey: ValkeyServer) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "turnmill", "doctor", "--redis-url", "http://:secret@h"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.stderr


# The embedded server


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder for sockets whose path is short enough."""
    with tempfile.TemporaryDirectory(prefix="tm") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield folder


def test_without_a_server_it_starts_none(doctor: Doctor, tmp_path: Path) -> None:
    checks = doctor()
    assert "no embedded server runs" in checks["redis"]["says"]
    assert "memory" not in checks
    assert not (tmp_path / "data").exists()


def test_it_joins_the_embedded_server_that_runs(
    doctor: Doctor, tmp_path: Path, sockets: str
) -> None:
    data = tmp_path / "data"
    assert running_server(data) is None
    with EmbeddedServer(data) as one:
        assert running_server(data) == one.url
        checks = doctor()
        assert one.url in checks["redis"]["says"]
        # Nobody set a limit, and nobody has to.
        assert checks["memory"]["state"] == checks["aof"]["state"] == "ok"
        assert "data disk" in checks
    assert running_server(data) is None


# Redis


INFO = {
    "valkey_version": "9.1.2",
    "role": "master",
    "aof_enabled": 1,
    "maxmemory_policy": "noeviction",
    "used_memory": 1_000_000_000,
    "maxmemory": 4_000_000_000,
    "total_system_memory": 16_000_000_000,
}


@pytest.mark.parametrize(
    ("check", "info", "state", "said"),
    [
        (server.version, {}, "ok", "Valkey 9.1.2"),
        (server.version, {"valkey_version": None, "redis_version": "7.0.15"}, "ok", "Redis 7.0.15"),
        (server.version, {"valkey_version": None, "redis_version": "6.2.1"}, "bad", "Redis 7 or"),
        (server.version, {"cluster_enabled": 1}, "bad", "one server"),
        (server.role, {}, "ok", "primary"),
        (server.role, {"connected_slaves": 2}, "ok", "2 replicas"),
        (server.role, {"loading": 1}, "warn", "loading"),
        (server.append_only_file, {}, "ok", "on"),
        (server.append_only_file, {"aof_last_write_status": "err"}, "bad", "make room"),
        (server.append_only_file, {"aof_last_bgrewrite_status": "err"}, "warn", "rewrite failed"),
        (server.snapshots, {}, "ok", ""),
        (server.snapshots, {"rdb_last_bgsave_status": "err"}, "bad", "MISCONF"),
    ],
)
def test_what_is_read_in_info(
    check: Callable[[Any], Check], info: dict[str, Any], state: str, said: str
) -> None:
    given = {name: value for name, value in (INFO | info).items() if value is not None}
    found = check(given)
    assert found.state == state
    assert said in f"{found.says} {found.advice}"


@pytest.mark.parametrize(
    ("used", "limit", "embedded", "state", "said"),
    [
        (1.0, 4, False, "ok", "1.0 GB used of 4.0 GB (25%)"),
        (3.2, 4, False, "warn", "(80%)"),
        (3.4, 4, False, "bad", "no more turns are taken"),
        (1.0, 15, False, "warn", "lower maxmemory"),
        (1.0, 0, False, "warn", "its machine has 16.0 GB"),
        (1.0, 0, True, "ok", "its machine has 16.0 GB"),
        (13.0, 0, True, "bad", "larger machine"),
    ],
)
def test_memory(used: float, limit: float, embedded: bool, state: str, said: str) -> None:
    info = INFO | {"used_memory": int(used * 1e9), "maxmemory": int(limit * 1e9)}
    found = server.memory(info, embedded)
    assert found.state == state
    assert said in f"{found.says} {found.advice}"


def test_enqueue_refuses_from_the_share_that_it_names() -> None:
    text = (ROOT / "producer/turnmill/lua/enqueue.lua").read_text()
    assert f"> {server.FULL} * limit" in text


def test_what_a_careless_redis_is_told(
    doctor: Doctor, own_valkey: Callable[..., ValkeyServer]
) -> None:
    farm = Farm(own_valkey(appendonly="no", maxmemory_policy="allkeys-lru").url)
    checks = doctor(farm=farm, exits=1)
    assert (checks["aof"]["state"], checks["eviction"]["state"]) == ("warn", "bad")
    assert "noeviction" in checks["eviction"]["advice"]
    assert checks["memory"]["state"] == "warn"


def test_a_replica_is_bad(doctor: Doctor, own_valkey: Callable[..., ValkeyServer]) -> None:
    replica = own_valkey(replicaof="127.0.0.1 1")
    checks = doctor(farm=Farm(replica.url), exits=1)
    assert checks["role"]["state"] == "bad"
    assert "127.0.0.1:1" in checks["role"]["advice"]


async def test_clocks(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await server.clock(client)).state == "ok"
    monkeypatch.setattr("time.time", lambda: 1e9)
    found = await server.clock(client)
    assert found.state == "warn"
    assert "ahead of" in found.says


# Rights


def as_user(server: ValkeyServer, *rules: str) -> Farm:
    with redis.Redis.from_url(server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "u", "on", ">p", "resetchannels", *rules)
    return Farm(f"unix://u:p@{server.socket}")


def documented(kind: str) -> list[str]:
    text = (ROOT / "docs/operations.md").read_text()
    (line,) = re.findall(rf"^```text {kind}\nuser \S+ (.*)\n```$", text, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize(
    ("kind", "said"), [("acl", "ask and answer"), ("acl-producer", "may not store replies")]
)
def test_the_documented_rights_are_enough(
    doctor: Doctor, own_valkey: Callable[..., ValkeyServer], kind: str, said: str
) -> None:
    checks = doctor(farm=as_user(own_valkey(maxmemory="1gb"), *documented(kind)))
    assert said in checks["rights"]["says"]
    assert {check["state"] for name, check in checks.items() if not name.endswith("disk")} == {"ok"}


@pytest.mark.parametrize(
    ("less", "said"),
    [
        (["-xadd", "-zrange"], "may not: XADD, ZRANGE "),
        (["-script|load"], "no permissions to run the 'script|load'"),
        (["-evalsha"], "no permissions to run the 'evalsha'"),
        (["-info"], "may not: INFO "),
        (["resetkeys", "~other:*"], "scripts do not run"),
        (["resetkeys", "~turnmill:", "~turnmill:q:*"], "may not: read replies"),
    ],
)
def test_lacking_rights_are_named(
    doctor: Doctor, own_valkey: Callable[..., ValkeyServer], less: list[str], said: str
) -> None:
    found = doctor(farm=as_user(own_valkey(), *documented("acl"), *less), exits=1)["rights"]
    assert found["state"] == "bad"
    assert said in found["says"]
    assert "Access" in found["advice"]


def test_every_command_of_the_scripts_is_asked_for() -> None:
    files = [
        file for folder in ("producer", "worker") for file in ROOT.glob(f"{folder}/*/lua/*.lua")
    ]
    called = set(re.findall(r"\bC\('([A-Z]+)'", "".join(file.read_text() for file in files)))
    assert {"ZADD", "HRANDFIELD"} < called
    assert called <= set(server.NEEDED)


# The farm


async def checks_of(by_hand: ByHand) -> dict[str, Check]:
    return {check.name: check for check in await of_farm.examine(by_hand.redis, by_hand.keys)}


async def test_turns_that_nobody_serves_are_bad_until_somebody_does(
    by_hand: ByHand, worker: Callable[..., SimWorker], doctor: Doctor, farm: Farm
) -> None:
    await by_hand.enqueue("a", "b")
    assert "turns wait for nobody: 2 of m" in doctor(farm=farm, exits=1)["queues"]["says"]
    worker("--served-name", "m", "--slots", "1", sim=("--hang-if", "", "--adapter", "sql"))
    checks = doctor(farm=farm)
    assert checks["queues"]["state"] == "ok"
    assert checks["workers"]["says"] == "1: 1 of m, 1 of m:sql"
    assert checks["lease"]["says"].startswith("1 s")


async def test_suspects_are_shown(by_hand: ByHand) -> None:
    await by_hand.enqueue("a")
    await by_hand.redis.zadd(by_hand.keys.suspects("m"), {h("a"): 1})
    found = (await checks_of(by_hand))["suspects"]
    assert (found.state, found.says) == ("warn", "workers died with these turns: 1 of m")


async def test_turns_of_a_newer_turnmill_are_shown(by_hand: ByHand) -> None:
    await by_hand.enqueue("a", body=b'{"v":999}')
    await by_hand.enqueue("b", body=b"no JSON")
    await by_hand.redis.zadd(by_hand.keys.due("m"), {h("a"): 1, h("b"): 1, "a foreign id": 1})
    found = (await checks_of(by_hand))["versions"]
    assert found.state == "warn"
    assert found.says.startswith("1 turns")


async def test_a_lease_that_is_none(by_hand: ByHand) -> None:
    assert (await checks_of(by_hand))["lease"].state == "ok"
    await by_hand.redis.set(by_hand.keys.lease, "soon")
    found = (await checks_of(by_hand))["lease"]
    assert found.state == "bad"
    assert by_hand.keys.lease in found.advice


async def test_what_cannot_be_read_hides_nothing_else(by_hand: ByHand) -> None:
    await by_hand.redis.set(by_hand.keys.workers, "not a set")
    checks = await checks_of(by_hand)
    assert checks["workers"].state == "bad"
    assert checks["lease"].state == checks["bench"].state == "ok"


def test_unequal_engines_of_one_model() -> None:
    def info(version: str, model: str = "m") -> WorkerInfo:
        engine = {"engine": "sglang", "version": version, "model": model}
        return WorkerInfo.model_validate(
            {"id": "x", "host": "h", "pid": 1, "model": model, "engine": engine, "slots": 1,
             "context": 1, "running": 0, "state": "serving", "started": 0, "heartbeat": 0}
        )  # fmt: skip

    assert of_farm.engines([info("1"), info("1"), info("2", "other")]).state == "ok"
    found = of_farm.engines([info("1"), info("2")])
    assert (found.state, found.says) == ("warn", "unequal ones serve m")


# This machine


def test_engines_are_found_by_their_packages() -> None:
    assert machine.packages({}).state == "ok"
    assert machine.packages({"xllamacpp": "1"}).says == "xllamacpp 1"
    found = machine.packages({"sglang": "0.1"})
    assert found.state == "warn"
    assert re.fullmatch(r"sglang 0\.1 instead of \d+\.\d+\.\d+", found.says)
    pinned = found.says.rpartition(" ")[2]
    assert machine.packages({"sglang": f"{pinned}+cpu"}).state == "ok"


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an nvidia-smi of this text into an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def put(text: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    return put


def test_gpus(nvidia_smi: Callable[[str], None]) -> None:
    assert machine.gpu({"xllamacpp": "1"}).state == "ok"
    found = machine.gpu({"sglang": "1"})
    assert (found.state, "sglang want one" in found.says) == ("warn", True)
    nvidia_smi(
        "echo 'NVIDIA H100, 81559 MiB, 4 MiB, 550.54'; echo 'NVIDIA H100, 81559 MiB, 0 MiB, 550.54'"
    )
    found = machine.gpu({"sglang": "1"})
    assert found.state == "ok"
    assert found.says.startswith("NVIDIA H100 (4 MiB of 81559 MiB used), NVIDIA H100")
    assert found.says.endswith("driver 550.54")
    for broken, said in (("echo no driver >&2; exit 9", "no driver"), ("true", "lists none")):
        nvidia_smi(broken)
        found = machine.gpu({})
        assert found.state == "bad"
        assert said in found.says


def model_folder(path: Path, **files: str) -> Path:
    path.mkdir(exist_ok=True)
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def test_a_model_folder_is_looked_through(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def found(**files: str) -> str:
        check = machine.model(str(model_folder(folder, **files)))
        return f"{check.state}: {check.says}"

    assert found() == f"bad: {folder}: without config.json"
    assert found(config__json="{") == f"bad: {folder}: config.json is not JSON"
    assert found(config__json='{"architectures": ["Q"]}').endswith("there are no weights in it")
    assert found(a__safetensors="") == f"warn: {folder}: Q, without a chat template"
    assert found(tokenizer_config__json='{"chat_template": "x"}').startswith("ok: ")
    assert found(tokenizer_config__json="{}", chat_template__jinja="x").startswith("ok: ")
    index = '{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    assert found() == f"bad: {folder}: without b.safetensors"


def test_a_gguf_file_is_known_by_its_head(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF....tokenizer.chat_template....")
    assert machine.model(str(file)).state == "ok"
    file.write_bytes(b"GGUF....")
    assert machine.model(str(file)).state == "warn"
    for other in (b"", b"PK...."):
        file.write_bytes(other)
        assert machine.model(str(file)).state == "bad"


def test_an_id_is_looked_for_in_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert machine.model("org/name-1.5").state == "warn"
    snapshot = tmp_path / "models--org--name-1.5" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    model_folder(snapshot, config__json="{}", w__bin="", chat_template__jinja="x")
    assert machine.model("org/name-1.5").state == "ok"
    for path in ("/none/such", "./none", "none.gguf", "a/b/c"):
        assert machine.model(path).state == "bad"


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(free: float) -> None:
        room = type("Room", (), {"free": free, "total": 1e12})
        monkeypatch.setattr("shutil.disk_usage", lambda place: room)

    folder = tmp_path / "not" / "there"
    usage(2e11)
    found = machine.disk("runs", folder)
    assert (found.name, found.state) == ("runs disk", "ok")
    assert found.says == f"{folder}: 200.0 GB free of 1000.0 GB (20%)"
    usage(9e10)
    assert machine.disk("runs", folder).state == "warn"
