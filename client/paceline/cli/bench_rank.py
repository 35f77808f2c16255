"""A rank of `paceline bench`: makes the calls and times them; rank 0 reports each row to the launcher."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import paceline
from paceline._collectives.choose import choose, nodes_of, only
from paceline._collectives.schedules import SCHEDULES
from paceline._links.base import Purpose
from paceline._session.launcher_pipe import tell_launcher
from paceline.cli.sizes import ELEMENT_BYTES, bus_factor

_SEPARATE = frozenset({"reduce", "broadcast", "scatter", "gather", "send_recv"})
"""Collectives that a rank can leave before another has entered: a barrier, which is not timed, precedes each call."""

_LEAST, _MOST = 10, 2000
"""Least and most calls for a row: for large arrays enough for a median, for small ones for a 99th percentile."""

_TURNS = 10
"""How often each of several schedules has its turn, so that other load on the machine affects all alike."""


def make_call(group: paceline.Group, collective: str, nbytes: int, memory: str = "any") -> Callable[[], object]:
    """Returns a collective with its arrays, which are zeros: sums in place stay what they are, call after call."""

    def zeros(n: int) -> Any:
        array = group.empty(n) if memory == "group" else np.empty(n, np.float32)
        array[:] = 0  # touches its pages now; otherwise the timed calls would do so first
        return array

    n, rank, world, is_root = nbytes // ELEMENT_BYTES, group.rank, group.size, group.rank == 0
    x, out, part = zeros(n), zeros(n), zeros(n // world)

    def shift() -> None:
        group.send(x, (rank + 1) % world)
        group.recv((rank - 1) % world, out=out)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(x, out=x),
        "reduce": lambda: group.reduce(x, root=0, out=out if is_root else None),
        "reduce_scatter": lambda: group.reduce_scatter(x, out=part),
        "broadcast": lambda: group.broadcast(x, root=0, out=x),
        "scatter": lambda: group.scatter(x.reshape(world, -1) if is_root else None, root=0, out=part),
        "all_gather": lambda: group.all_gather(part, out=out),
        "gather": lambda: group.gather(part, root=0, out=out if is_root else None),
        "all_to_all": lambda: group.all_to_all(x, out=out),
        "send_recv": shift,
        "barrier": group.barrier,
    }
    return calls[collective]


def measure(
    group: paceline.Group, collective: str, nbytes: int, schedules: list[str | None], memory: str, seconds: float
) -> Iterator[dict[str, Any]]:
    """Measures a collective for about so many seconds by each schedule (None: the chosen one); yields rows."""
    call = make_call(group, collective, nbytes, memory)

    def time_calls(schedule: str | None, count: int) -> Any:
        """Returns the seconds of each call at its slowest rank; the same array at all ranks."""
        clock, times, ordinary = time.perf_counter, np.empty(count), group._core.choose
        group._core.choose = partial(choose, rules=only(collective, schedule)) if schedule else ordinary
        group.barrier()
        for index in range(count):
            if collective in _SEPARATE:
                group.barrier()
            start = clock()
            call()
            times[index] = clock() - start
        group._core.choose = ordinary
        return group.all_reduce(times, op="max")

    turns = 1 if len(schedules) == 1 else _TURNS
    counts = []
    for schedule in schedules:
        once = float(time_calls(schedule, 4)[1:].min())  # the first call opens links
        counts.append(-(-int(np.clip(seconds / once, _LEAST, _MOST)) // turns))
    times = [[time_calls(*lane) for lane in zip(schedules, counts, strict=True)] for _ in range(turns)]
    purpose, mesh = Purpose.POINT_TO_POINT if collective == "send_recv" else Purpose.COLLECTIVE, group._core.mesh
    own = [mesh.link(peer, purpose).kind for peer in mesh.linked(purpose)]
    used = {kind for of in group.all_gather_object(own) for kind in of}
    for schedule, found in zip(schedules, zip(*times, strict=True), strict=True):
        if schedule is None and collective in SCHEDULES:
            schedule = group._core.choose(collective, nbytes, group.size, nodes=nodes_of(mesh.peers)).schedule
        median, p10, p99 = np.percentile(np.concatenate(found), (50, 10, 99)).tolist()
        rate = nbytes / median * bus_factor(collective, group.size)
        yield {
            "collective": collective,
            "schedule": schedule,
            "link": "+".join(sorted(used, reverse=True)),  # gRPC last
            "world_size": group.size,
            "bytes": nbytes,
            "median_us": round(median * 1e6, 1),
            "p10_us": round(p10 * 1e6, 1),
            "p99_us": round(p99 * 1e6, 1),
            "busbw_GBps": round(rate / 1e9, 4),
        }


def main(asked: dict[str, Any]) -> None:
    """Measures what `run_bench` asks for, and reports rows."""
    with paceline.join(config=replace(paceline.Config.from_environment(), links=(asked["link"],))) as session:
        for collective, nbytes, schedules in asked["jobs"]:
            for row in measure(session.group, collective, nbytes, schedules, asked["memory"], asked["seconds"]):
                if session.rank == 0:
                    tell_launcher("row", row, wait_s=60.0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
