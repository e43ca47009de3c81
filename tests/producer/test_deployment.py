"""The deployment files, read as their tools read them. Every worker command line in them goes through the
worker's own parser, so that an option that is renamed is missed here and not on a farm."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from tests.processes import until

from turnmill_worker.cli import worker as worker_command

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "examples" / "slurm" / "worker.sbatch"
ONE_GPU = ROOT / "examples" / "docker" / "one-gpu.sh"
ENGINE_NEEDS = 30
"""Seconds that an engine may take to end after its last turn."""


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The worker's settings, as its own command line reads them."""
    return dict(worker_command.make_context("turnmill worker", list(arguments)).params)


def serves_sglang(arguments: list[str]) -> dict[str, Any]:
    settings = parsed(arguments)
    assert settings["engine_name"] == "sglang"
    assert settings["model"]
    assert settings["engine_arguments"], "what stands after -- must reach the engine"
    return settings


def with_defaults(text: str) -> str:
    """Compose's `${NAME:-default}` without an environment."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def in_seconds(duration: str) -> int:
    parts = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", duration)
    assert parts is not None, duration
    return 60 * int(parts[1] or 0) + int(parts[2] or 0)


# Compose


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = with_defaults((ROOT / "docker-compose.yml").read_text())
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def options(command: list[str]) -> dict[str, str]:
    assert all(isinstance(part, str) for part in command), "YAML made something else of a word"
    names, values = command[1::2], command[2::2]
    return {name.removeprefix("--"): value for name, value in zip(names, values, strict=True)}


def test_redis_keeps_what_it_was_given(compose: dict[str, Any]) -> None:
    redis = compose["services"]["redis"]
    given = options(redis["command"])
    assert given["appendonly"] == "yes"
    assert given["appendfsync"] in ("everysec", "always")
    assert given["maxmemory-policy"] == "noeviction"
    assert re.fullmatch(r"\d+gb", given["maxmemory"])
    assert [volume.partition(":")[0] for volume in redis["volumes"]] == ["redis-data"]
    assert redis["volumes"][0].endswith(":/data")
    assert "redis-data" in compose["volumes"]
    assert redis["restart"] == "unless-stopped"


def test_redis_starts_with_these_options(
    compose: dict[str, Any], own_valkey: Callable[..., Any]
) -> None:
    given = options(compose["services"]["redis"]["command"])
    server = own_valkey(**given)
    assert server.url


def test_redis_is_open_to_its_own_machine_alone(compose: dict[str, Any]) -> None:
    assert compose["services"]["redis"]["ports"] == ["127.0.0.1:6379:6379"]


def test_redis_is_healthy_when_it_has_loaded(compose: dict[str, Any]) -> None:
    check = compose["services"]["redis"]["healthcheck"]
    assert check["test"] == ["CMD-SHELL", "valkey-cli ping | grep -q PONG"]
    assert in_seconds(check["start_period"]) >= 300, "loading a large AOF takes minutes"


def test_compose_starts_a_worker_that_the_worker_understands(compose: dict[str, Any]) -> None:
    service = compose["services"]["worker"]
    assert service["entrypoint"] == ["one-gpu", "turnmill", "worker"]
    settings = serves_sglang(service["command"])
    assert in_seconds(service["stop_grace_period"]) >= settings["drain"] + ENGINE_NEEDS
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    assert service["environment"]["REDIS_URL"] == "redis://redis:6379"
    assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}


def test_compose_reserves_gpus_and_can_be_scaled(compose: dict[str, Any]) -> None:
    service = compose["services"]["worker"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert not {"container_name", "hostname", "ports"} & service.keys(), "one for all replicas"
    assert "gpu-locks:/run/gpu-locks" in service["volumes"], "all replicas share the locks"
    named = {volume.partition(":")[0] for volume in service["volumes"]}
    assert named <= compose["volumes"].keys()


def has_compose() -> bool:
    docker = shutil.which("docker")
    if docker is None:
        return False
    return subprocess.run([docker, "compose", "version"], capture_output=True).returncode == 0


@pytest.mark.skipif(not has_compose(), reason="no docker compose here")
def test_compose_reads_its_file() -> None:
    done = subprocess.run(
        ["docker", "compose", "--file", ROOT / "docker-compose.yml", "config", "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    services = json.loads(done.stdout)["services"]
    serves_sglang(services["worker"]["command"])


# One GPU for each replica


def program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def test_each_replica_takes_a_gpu_of_its_own(tmp_path: Path) -> None:
    program(tmp_path / "nvidia-smi", "#!/bin/sh\nprintf '0\\n1\\n'\n")
    (tmp_path / "locks").mkdir()
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "GPU_LOCKS": str(tmp_path / "locks"),
    }

    def start() -> subprocess.Popen[str]:
        # It says which GPU it has, and lives until its standard input ends.
        shell = 'echo "$CUDA_VISIBLE_DEVICES"; exec cat > /dev/null'
        return subprocess.Popen(
            [ONE_GPU, "sh", "-c", shell],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def gpu(replica: subprocess.Popen[str]) -> str:
        assert replica.stdout is not None
        return replica.stdout.readline().strip()

    replicas = [start(), start()]
    try:
        assert {gpu(replica) for replica in replicas} == {"0", "1"}
        third = start()
        _, said = third.communicate()
        assert third.returncode == 2
        assert "every GPU" in said
        # When one dies, in whatever way, its GPU is free again.
        replicas[0].kill()
        replicas[0].wait()
        replicas.append(start())
        assert gpu(replicas[-1]) in ("0", "1")
    finally:
        for replica in replicas:
            replica.kill()
            replica.communicate()


# Dockerfile


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.split(maxsplit=1) for line in lines]
    return [(name, rest) for name, rest in pairs]


def test_the_image_has_the_sglang_that_the_adapter_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = project["optional-dependencies"]["sglang"]
    version = pinned.removeprefix("sglang==")
    assert instructions()[:2] == [
        ("ARG", f"SGLANG_VERSION={version}"),
        ("FROM", "lmsysorg/sglang:v${SGLANG_VERSION}"),
    ]


def test_the_image_is_built_from_what_is_there() -> None:
    copied = [rest for name, rest in instructions() if name == "COPY"]
    sources = [word for rest in copied for word in rest.split()[:-1] if not word.startswith("--")]
    assert {"pyproject.toml", "README.md", "LICENSE", "producer", "worker"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source


def test_the_image_starts_a_worker_that_gets_signals() -> None:
    last = dict(instructions())
    assert json.loads(last["ENTRYPOINT"]) == ["turnmill", "worker"]
    with pytest.raises(click.exceptions.Exit):  # --help
        parsed(json.loads(last["CMD"]))
    assert ONE_GPU.stat().st_mode & stat.S_IXUSR


def test_the_command_lines_in_the_comments_are_right() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (line,) = re.findall(r"turnmill-worker (--engine .*)", text)
    assert parsed(shlex.split(line))["engine_name"] == "sglang"


# Slurm


def directives() -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH.read_text(), re.MULTILINE)
    return dict(found)


def sbatch_arguments() -> list[str]:
    text = re.sub(r"\\\n", " ", SBATCH.read_text())
    (line,) = re.findall(r"^\s*turnmill worker (.*) &$", text, re.MULTILINE)
    return shlex.split(with_defaults(line))


def test_slurm_starts_a_worker_that_the_worker_understands() -> None:
    settings = serves_sglang(sbatch_arguments())
    given = directives()
    assert given["gpus-per-node"] == "1"
    assert "requeue" in given
    kind, name, seconds = re.split("[:@]", given["signal"])
    assert (kind, name) == ("B", "TERM")
    assert int(seconds) >= settings["drain"] + ENGINE_NEEDS
    subprocess.run(["bash", "-n", SBATCH], check=True)


def run_sbatch(tmp_path: Path, turnmill: str) -> subprocess.Popen[bytes]:
    """The batch script with another `turnmill`, as Slurm's node would run it."""
    program(tmp_path / "turnmill", f"#!/bin/bash\n{turnmill}\n")
    (tmp_path / "env").write_text("REDIS_URL=redis://somewhere\n")
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TURNMILL_ENV": str(tmp_path / "env"),
    }
    return subprocess.Popen(["bash", SBATCH], env=environment, cwd=tmp_path)


def test_slurm_starts_a_worker_again_whose_engine_died(tmp_path: Path) -> None:
    script = 'echo "$REDIS_URL" >> starts; [ "$(wc -l < starts)" -lt 3 ] && exit 70; exit 0'
    assert run_sbatch(tmp_path, script).wait(30) == 0
    assert (tmp_path / "starts").read_text().split() == ["redis://somewhere"] * 3


def test_slurm_leaves_a_worker_that_is_configured_wrongly(tmp_path: Path) -> None:
    assert run_sbatch(tmp_path, "echo >> starts; exit 2").wait(30) == 2
    assert (tmp_path / "starts").read_text() == "\n"


def test_slurm_waits_for_a_worker_that_drains(tmp_path: Path) -> None:
    worker = (
        "trap 'touch draining; until [ -e drained ]; do sleep 0.02; done; exit 0' TERM\n"
        "touch started\n"
        "while true; do sleep 0.02; done"
    )
    job = run_sbatch(tmp_path, worker)
    try:
        until((tmp_path / "started").exists, "the worker is there")
        job.send_signal(signal.SIGTERM)
        until((tmp_path / "draining").exists, "the worker was told")
        assert job.poll() is None
        (tmp_path / "drained").touch()
        assert job.wait(30) == 0
    finally:
        (tmp_path / "drained").touch()
        job.kill()
        job.wait()


# Kubernetes


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    text = (ROOT / "examples" / "k8s" / "worker.yaml").read_text()
    deployment = yaml.safe_load(text)
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    spec = deployment["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    # With a surge, a new worker would wait for a GPU that the old one still has.
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    template: dict[str, Any] = spec["template"]["spec"]
    return template


def test_kubernetes_starts_a_worker_that_the_worker_understands(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    assert "command" not in container, "the image's entry point is the worker"
    settings = serves_sglang(container["args"])
    assert pod["terminationGracePeriodSeconds"] >= settings["drain"] + ENGINE_NEEDS
    assert pod["restartPolicy"] == "Always"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}


def test_kubernetes_keeps_the_password_in_a_secret(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    (redis_url,) = container["env"]
    assert redis_url["name"] == "REDIS_URL"
    assert redis_url["valueFrom"]["secretKeyRef"] == {"name": "turnmill", "key": "redis-url"}


def test_kubernetes_mounts_what_it_has(pod: dict[str, Any]) -> None:
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
