"""Engines by name, and how they refuse what they cannot be built from."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from turnmill.errors import UsageError
from turnmill_worker.engines import ENGINES, load
from turnmill_worker.engines.base import EngineSettings


def test_an_unknown_engine_is_told_which_there_are():
    with pytest.raises(UsageError, match="'vlm' is unknown") as refused:
        load("vlm")
    assert all(name in str(refused.value) for name in ENGINES)


@pytest.mark.skipif(bool(importlib.util.find_spec("xllamacpp")), reason="xllamacpp is installed")
def test_a_missing_package_is_named_with_what_installs_it():
    with pytest.raises(UsageError, match=r"needs xllamacpp.*pip install 'turnmill\[local\]'"):
        load("local")


def test_loading_sim_imports_no_other_engine():
    program = (
        "import sys; from turnmill_worker.engines import load; load('sim');"
        "print([name for name in ('xllamacpp', 'sglang', 'torch') if name in sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert seen.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--latency", "soon"), "--latency: invalid amount value: 'soon'"),
        (("--latency", "-1"), "--latency: -1 is not a finite number of 0 or more"),
        (("--context", "0"), "--context: 0 is not 1 or more"),
        (("--answer", "42"), "--answer: invalid choice: '42'"),
        (("--lat", "1"), "unrecognized arguments: --lat 1"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], complaint: str):
    with pytest.raises(UsageError) as refused:
        load("sim")(EngineSettings(arguments=arguments))
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
