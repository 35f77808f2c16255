"""Checks a trace against Chrome's format ("Trace Event Format", 2016) and what Perfetto's importer makes of it.

Perfetto sorts all events by time, and those of one time as they come in the file. It keeps a stack of open slices for
each thread, drops a slice that crosses an open one, and ties an arrow's end to the innermost open slice of its thread;
an arrow that ends before it began, or where no slice is open, is dropped too. It names threads by their number alone.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from typing import Any

__all__ = ["check_trace"]

_NEEDED = {
    "X": {"name": str, "cat": str, "ts": int, "dur": int, "args": dict},
    "i": {"name": str, "cat": str, "ts": int, "s": str},
    "s": {"name": str, "cat": str, "ts": int, "id": int},
    "f": {"name": str, "cat": str, "ts": int, "id": int, "bp": str},
    "M": {"name": str, "args": dict},
}
"""Times are whole: Perfetto cuts off what is left of a nanosecond, so slices that touch might cross."""


def check_trace(trace: dict[str, Any]) -> None:
    """Raises AssertionError over the first thing that is wrong."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    events = trace["traceEvents"]
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    for event in events:
        kind = event["ph"]
        assert kind in _NEEDED, event
        for name, type_ in {"pid": int, "tid": int, **_NEEDED[kind]}.items():
            assert isinstance(event[name], type_), f"{name} of {event}"
        if kind == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index"), event
            continue
        assert event["ts"] >= 0, event
        assert any(name == "process_name" and pid == event["pid"] for name, pid, _ in named), event
        assert ("thread_name", event["pid"], event["tid"]) in named, event
        assert event.get("dur", 0) >= 0, event
        assert event.get("s", "t") in ("g", "p", "t"), event
        assert event.get("bp", "e") == "e", event
    threads = Counter(tid for name, _, tid in named if name == "thread_name")
    assert all(count == 1 for count in threads.values()), "processes have threads of the same number"
    phases = Counter((event["ph"], event["id"]) for event in events if event["ph"] in "sf")
    assert all(count == 1 and phases["fs"[ph == "f"], id_] == 1 for (ph, id_), count in phases.items()), phases
    _import([event for event in events if event["ph"] in "Xsf"])


def _import(events: list[dict[str, Any]]) -> None:
    """Draws slices and arrows as Perfetto does; nothing may be dropped."""
    open_: dict[int, list[tuple[int, int]]] = defaultdict(list)
    begun: set[int] = set()
    for event in sorted(events, key=lambda each: each["ts"]):
        now, stack = event["ts"], open_[event["tid"]]
        length = event.get("dur", 0)
        while stack and (stack[-1][1] < now or (stack[-1][1] == now and stack[-1][0] < now)):
            stack.pop()
        if event["ph"] == "X":
            assert all(end <= now or now + length <= end for _, end in stack), f"it crosses another slice: {event}"
            stack.append((now, now + length))
            continue
        assert stack, f"no slice is open at {event}"
        if event["ph"] == "s":
            begun.add(event["id"])
        else:
            assert event["id"] in begun, f"it ends before it began: {event}"
