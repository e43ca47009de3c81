"""How many different results a trade has in some time zones, among them the outermost and those of daylight saving."""

from __future__ import annotations

import os
import time

from turnmill.scaffolds.bfcl.entries import read
from turnmill.scaffolds.bfcl.world import world

ZONES = (
    "UTC",
    "XXX+12",
    "YYY-14",
    "ZZZ-5:45",
    "CST6CDT,M3.2.0,M11.1.0",
    "AEST-10AEDT,M10.1.0,M4.1.0/3",
)
CALLS = [
    "fund_account(amount=100000)",
    "place_order(order_type='Buy',symbol='AAPL',price=1,amount=1)",
]
LOOK = ["get_transaction_history()"]

entry = next(one for one in read("base").items if "TradingBot" in one.fields["involved_classes"])
seen = set()
for zone in ZONES:
    os.environ["TZ"] = zone
    time.tzset()
    with world(entry) as simulated:
        results = simulated.execute(CALLS + LOOK)
    assert "2024-09-0" in results[-1], results
    seen.add(tuple(results))
print(len(seen))
