"""Children that end with their parent."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from turnmill.children import parent_death_signal

PARENT = """
import subprocess, sys
from turnmill.children import parent_death_signal

# The child holds standard output open for as long as it lives.
child = subprocess.Popen(["sleep", "1000"], preexec_fn=parent_death_signal())
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.faults
def test_a_child_ends_with_its_killed_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        readable, _, _ = select.select([parent.stdout], [], [], 0)
        assert not readable
        parent.kill()
        assert parent.stdout.read() == b"", "the pipe ends only when the child has ended too"


def test_a_child_that_was_orphaned_before_it_could_ask_ends_itself() -> None:
    in_child = parent_death_signal()
    # A grandchild has another parent than the process that made `in_child`.
    middle = os.fork()
    if middle == 0:
        grandchild = os.fork()
        if grandchild == 0:
            in_child()
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(middle, 0)[1]) == 1
