"""What two attempts at a conversation are told, of a text in which something looks like a call: the benchmark writes its own name before that."""

from __future__ import annotations

import json

from turnmill.scaffolds.bfcl.entries import read
from turnmill.scaffolds.bfcl.world import world

(entry, *_) = read("base").items
ECHO = {"name": "echo", "arguments": json.dumps({"content": "sort (by name), then ls()"})}


def attempt() -> str:
    with world(entry) as simulated:
        (told,) = simulated.execute([simulated.call_of(ECHO)])
    return told


first = attempt()
for _ in range(10):
    assert attempt() == first
print(first)
