"""Whether this machine can do its part: engines, model, GPU, room on its disks. Looks from outside: no engine is
imported here, and nothing is loaded."""

from __future__ import annotations

import json
import mmap
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from turnmill.doctor.check import Check, size, some

ENGINES: Final = ("sglang", "vllm", "xllamacpp")
ON_GPU: Final = ("sglang", "vllm")
FREE_SHARE: Final = 0.1
FREE_BYTES: Final = 5e9
NVIDIA_SMI: Final = "nvidia-smi"
NVIDIA_SMI_SECONDS: Final = 20.0
GGUF_HEAD: Final = 64 << 20
"""Bytes: what a GGUF file says of itself stands before its tensors."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def python() -> Check:
    return Check(
        "turnmill",
        "ok",
        f"{metadata.version('turnmill')} with Python {platform.python_version()}",
    )


# Engines


def installed(names: tuple[str, ...] = ENGINES) -> dict[str, str]:
    """Which of these packages are there, with their versions."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def packages(found: dict[str, str]) -> Check:
    pinned = dict(
        re.findall(
            r"^(\w+)==([\w.]+)", "\n".join(metadata.requires("turnmill") or ()), re.MULTILINE
        )
    )
    wrong = [
        f"{name} {version} instead of {pinned[name]}"
        for name, version in found.items()
        if version.partition("+")[0] != pinned.get(name, version.partition("+")[0])
    ]
    if wrong:
        advice = (
            f"pip install 'turnmill[{wrong[0].partition(' ')[0]}]': its adapter is for one version"
        )
        return Check("packages", "warn", some(wrong), advice)
    if not found:
        return Check("packages", "ok", "no engine here: this machine asks, others answer")
    return Check("packages", "ok", some([f"{name} {version}" for name, version in found.items()]))


def gpu(found: dict[str, str]) -> Check:
    program = shutil.which(NVIDIA_SMI)
    wanting = [name for name in ON_GPU if name in found]
    if program is None:
        if wanting:
            advice = "install the driver, or give the container its GPUs (--gpus all)"
            says = f"none found ({NVIDIA_SMI} is not there); {' and '.join(wanting)} want one"
            return Check("gpu", "warn", says, advice)
        return Check("gpu", "ok", "none found, and nothing here needs one")
    query = "--query-gpu=name,memory.total,memory.used,driver_version"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_SECONDS,
        )
        problem = (done.stdout or done.stderr).strip() if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        done, problem = None, str(error)
    if done is None or done.returncode or not done.stdout.strip():
        advice = "mend the driver: no engine will find a GPU before nvidia-smi does"
        says = f"{NVIDIA_SMI} fails: {' '.join(problem.split())[:200] or 'it lists none'}"
        return Check("gpu", "bad", says, advice)
    lines = [line.split(", ") for line in done.stdout.strip().splitlines()]
    each = [f"{one[0]} ({one[2]} of {one[1]} used)" if len(one) == 4 else one[0] for one in lines]
    driver = f"; driver {lines[0][3]}" if len(lines[0]) == 4 else ""
    return Check("gpu", "ok", f"{some(each, most=8)}{driver}")


# The model


def model(wanted: str) -> Check:
    """A folder as SGLang and vLLM take it, a GGUF file, or an id of the Hugging Face hub."""
    path = Path(wanted).expanduser()
    try:
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _gguf(path)
    except OSError as error:
        advice = "let this user read it"
        return Check("model", "bad", f"{path} cannot be read: {error.strerror or error}", advice)
    if not _HUB_ID.fullmatch(wanted) or path.suffix == ".gguf":
        return Check("model", "bad", f"{wanted} does not exist", "correct the path, or mount it")
    snapshot = _in_hub_cache(wanted)
    if snapshot is None:
        advice = "download it before workers start, if they have no way to the hub"
        return Check("model", "warn", f"{wanted} is not on this machine yet", advice)
    return _folder(snapshot)


def _folder(folder: Path) -> Check:
    def bad(says: str) -> Check:
        return Check("model", "bad", f"{folder}: {says}", "copy or download the model again")

    config, problem = _read_json(folder / "config.json")
    if config is None:
        return bad(problem)
    index, _ = _read_json(folder / "model.safetensors.index.json")
    shards = sorted(set(index.get("weight_map", {}).values())) if index else []
    missing = [shard for shard in shards if not os.access(folder / shard, os.R_OK)]
    if missing:
        return bad(f"without {some(missing, most=2)}")
    if not any(
        True for pattern in ("*.safetensors", "*.bin", "*.pt") for _ in folder.glob(pattern)
    ):
        return bad("there are no weights in it")
    kind = some([str(name) for name in config.get("architectures") or ["of an unnamed kind"]])
    says = f"{folder}: {kind}"
    if not _has_template(folder):
        advice = "a base model? Turns are messages: give the engine a --chat-template"
        return Check("model", "warn", f"{says}, without a chat template", advice)
    return Check("model", "ok", f"{says}, with a chat template")


def _has_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    tokenizer, _ = _read_json(folder / "tokenizer_config.json")
    return bool(tokenizer and tokenizer.get("chat_template"))


def _gguf(file: Path) -> Check:
    with open(file, "rb") as opened:
        if opened.read(4) != b"GGUF":
            advice = "give a GGUF file, or the folder that config.json is in"
            return Check("model", "bad", f"{file} is no GGUF file", advice)
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            has_template = content.find(b"tokenizer.chat_template", 0, GGUF_HEAD) >= 0
    says = f"{file}: GGUF, {size(file.stat().st_size)}"
    if not has_template:
        advice = "a base model? Turns are messages: give the engine a --chat-template"
        return Check("model", "warn", f"{says}, without a chat template", advice)
    return Check("model", "ok", f"{says}, with a chat template")


def _in_hub_cache(id: str) -> Path | None:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = list((cache / f"models--{id.replace('/', '--')}" / "snapshots").glob("*/config.json"))
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def _read_json(file: Path) -> tuple[dict[str, Any] | None, str]:
    """What is in the file; or None, and why."""
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None, f"without {file.name}"
    except OSError as error:
        return None, f"{file.name} cannot be read: {error.strerror or error}"
    except ValueError:
        return None, f"{file.name} is not JSON"
    return (found, "") if isinstance(found, dict) else (None, f"{file.name} is no JSON object")


# Disks


def disk(name: str, folder: Path) -> Check:
    """Room where `folder` is, or will be."""
    name, place = f"{name} disk", folder.expanduser().resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK | os.X_OK):
        return Check(name, "bad", f"{place} cannot be written", "let this user write there")
    room = shutil.disk_usage(place)
    says = f"{folder}: {size(room.free)} free of {size(room.total)} ({room.free / room.total:.0%})"
    if room.free < FREE_BYTES or room.free < FREE_SHARE * room.total:
        return Check(name, "warn", says, "make room: what is full ends a run, or its Redis")
    return Check(name, "ok", says)


def examine(wanted: str | None, folders: dict[str, Path]) -> list[Check]:
    """All checks of this machine. May take seconds."""
    found = installed()
    checks: list[Callable[[], Check]] = [python, lambda: packages(found), lambda: gpu(found)]
    of_disks = [disk(name, folder) for name, folder in folders.items()]
    return [*(check() for check in checks), *([model(wanted)] if wanted else []), *of_disks]
