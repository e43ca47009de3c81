"""What a figure depends on, printed beside it."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("turnmill", "arq", "redis", "hiredis", "pydantic", "uvloop")


def conditions(server: str) -> dict[str, str]:
    """Machine and software. `server`: the Redis-compatible server's own words."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
        "load average": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "server": f"{server}, AOF on (everysec), unix socket",
        "packages": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
    }


def versions_in(python: Path, packages: Sequence[str]) -> str:
    """Versions of packages in another environment."""
    code = (
        "import sys; from importlib.metadata import version; "
        "print(', '.join(f'{p} {version(p)}' for p in sys.argv[1:]))"
    )
    command = [str(python), "-c", code, *packages]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"
