"""Calls that would open a file, or take for ever, if they were run as they are."""

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
ENDLESS = {
    "power": {"base": 9, "exponent": 10**9},
    "square_root": {"number": 2, "precision": 10**9},
    "logarithm": {"value": 2, "base": 10, "precision": 1e9},
    "round_number": {"number": 5, "decimal_places": -(10**9)},
}

with world(read("base").items[0]) as simulated:
    for function in NOT_CALLS:
        try:
            raise SystemExit(f"a call: {simulated.call_of(function)}")
        except NoCall:
            pass
    call = simulated.call_of({"name": "open", "arguments": '{"file": "evil", "mode": "w"}'})
    print(*simulated.execute([call]))

counting = next(one for one in read("base").items if "MathAPI" in one.fields["involved_classes"])
with world(counting) as simulated:
    for name, arguments in ENDLESS.items():
        call = simulated.call_of({"name": name, "arguments": json.dumps(arguments)})
        print(*simulated.execute([call]))
    call = simulated.call_of({"name": "power", "arguments": '{"base": 9, "exponent": 2}'})
    print(*simulated.execute([call]))
