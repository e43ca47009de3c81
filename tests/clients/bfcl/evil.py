"""Calls that would open a file, if they were run as they are."""

from __future__ import annotations

import json

from turnmill.scaffolds.bfcl.entries import read
from turnmill.scaffolds.bfcl.world import NoCall, world

NOT_CALLS = [
    {"name": "__import__('os').mkdir", "arguments": json.dumps({"path": "evil"})},
    {"name": "ls", "arguments": json.dumps({"a=open('evil', 'w'), b": True})},
    {"name": "lambda", "arguments": "{}"},
    {"name": "ls", "arguments": "[1]"},
    {"name": "ls", "arguments": "{"},
    {"name": "ls", "arguments": "[" * 100_000},
]

with world(read("base").items[0]) as simulated:
    for function in NOT_CALLS:
        try:
            raise SystemExit(f"a call: {simulated.call_of(function)}")
        except NoCall:
            pass
    call = simulated.call_of({"name": "open", "arguments": '{"file": "evil", "mode": "w"}'})
    print(*simulated.execute([call]))
