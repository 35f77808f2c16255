"""Prints what recoveries of many members cost one coordinator: a table of CPU time, orders and bytes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for `support`, which a script does not find

from unit.protocol.recovery import recover

if __name__ == "__main__":
    print("  W     laggards  CPU s   events  effects   orders  donors named    MB sent")
    for world in map(int, sys.argv[1:] or ["100", "300", "1000", "5000"]):
        for laggards in (False, True):
            costs = recover(world, laggards=laggards)
            who = "half" if laggards else "none"
            print(
                f"{world:5,}  {who:>8}  {costs.cpu:6.3f} {costs.events:7,} {costs.effects:8,}"
                f" {costs.orders:8,} {costs.donors:12,} {costs.sent / 1e6:10.2f}",
                flush=True,
            )
