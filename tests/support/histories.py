"""Checks that a history of store calls is linearizable: that each call can have happened at one moment while it ran.

The check goes through the calls and returns in order of time, after Wing and Gong ("Testing and verifying concurrent
objects", 1993), and takes a call as done only when another one's result needs it, as Lowe proposes ("Testing for
linearizability", 2017). A *possibility* is the value of a key and the open calls that are done by then. When a call
returns, each possibility in which its result is right survives; if none survives, the history is refused. Keys are
checked one by one, since a store is linearizable if each key is.

A call without a known result may happen at any time after it began, or never. So a possibility is dropped if another
one has the same value, the same known calls done, and fewer of those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["FOREVER", "UNKNOWN", "Call", "check", "is_right", "overlapping"]

FOREVER = float("inf")
"""When a call returns whose result is not known."""


class _Unknown:
    def __repr__(self) -> str:
        return "?"


UNKNOWN = _Unknown()
"""The result of a call that failed without saying whether it happened."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of one client; equal only to itself.

    Attributes:
        client: who called.
        kind: "get" (result: the value, None if the key is missing), "set" (None), "add" (the sum), "compare_set"
            (whether it was set, and the value afterwards), "delete" (whether the key was there).
        key: of which key.
        arguments: value; amount; expected and desired.
        result: `UNKNOWN` if nobody knows whether it happened.
        began, ended: times on one clock. Calls that touch at one instant count as one after the other in either order.
    """

    client: str
    kind: str
    key: str
    arguments: tuple[object, ...]
    result: object
    began: float
    ended: float = FOREVER

    def __str__(self) -> str:
        words = ", ".join(map(repr, self.arguments))
        return f"{self.began:.6f} to {self.ended:.6f}  {self.client}: {self.kind}({words}) -> {self.result!r}"


def is_right(call: Call, value: object) -> tuple[bool, object]:
    """Returns whether a call at this value of its key has its result, and the value afterwards."""
    match call.kind, call.arguments:
        case "get", ():
            result, after = value, value
        case "set", (new,):
            result, after = None, new
        case "add", (int(amount),):
            result = after = (value if isinstance(value, int) else 0) + amount
        case "compare_set", (expected, desired):
            after = desired if value == expected else value
            result = (value == expected, after)
        case "delete", ():
            result, after = value is not None, None
        case _:
            raise ValueError(f"{call.kind}{call.arguments} is no call of a store")
    return call.result is UNKNOWN or call.result == result, after


class _Possibility(NamedTuple):
    value: object
    done: frozenset[Call]
    """Open calls that have happened and will return."""
    perhaps: frozenset[Call]
    """Calls without a known result that have happened."""


def check(history: Iterable[Call], first: object = None) -> list[str]:
    """Returns what is wrong with each key whose calls are not linearizable.

    Args:
        history: the calls, in any order.
        first: the value of each key at the start; None if it is missing.
    """
    by_key: defaultdict[str, list[Call]] = defaultdict(list)
    for call in history:
        if call.result is not UNKNOWN or call.kind != "get":
            by_key[call.key].append(call)
    found = [_check_key(key, calls, first) for key, calls in sorted(by_key.items())]
    return [text for text in found if text is not None]


def _check_key(key: str, calls: Sequence[Call], first: object) -> str | None:
    events = sorted(_events(calls), key=lambda event: event[:2])
    possible = {_Possibility(first, frozenset(), frozenset())}
    is_open: dict[Call, None] = {}
    returned: list[Call] = []
    for _, returns, call in events:
        if not returns:
            is_open[call] = None
            continue
        survived = _minimal(each for before in possible for each in _until(call, before, is_open))
        if not survived:
            return _refusal(key, call, possible, is_open, returned)
        possible = survived
        del is_open[call]
        returned.append(call)
    return None


def _events(calls: Iterable[Call]) -> Iterator[tuple[float, bool, Call]]:
    for call in calls:
        yield call.began, False, call
        if call.result is not UNKNOWN:
            yield call.ended, True, call


def _until(call: Call, before: _Possibility, is_open: Iterable[Call]) -> Iterator[_Possibility]:
    """All possibilities after `before` in which the call has happened, and has its result, as the last of all."""
    if call in before.done:
        yield before._replace(done=before.done - {call})
        return
    start = (before, False)
    seen, turn = {start}, {start}
    while turn:
        nexts: set[tuple[_Possibility, bool]] = set()
        for (value, done, perhaps), in_vain in turn:
            right, after = is_right(call, value)
            if right and not (in_vain and _is_blind(call)):
                yield _Possibility(after, done, perhaps)
            offered: set[tuple[str, tuple[object, ...]]] = set()  # of unknown calls that are alike the first is enough
            for other in is_open:
                if other is call or other in done or other in perhaps or (in_vain and _is_blind(other)):
                    continue
                right, after = is_right(other, value)
                if other.result is not UNKNOWN:
                    if right:
                        nexts.add((_Possibility(after, done | {other}, perhaps), False))
                elif after != value and (other.kind, other.arguments) not in offered:
                    offered.add((other.kind, other.arguments))
                    nexts.add((_Possibility(after, done, perhaps | {other}), True))
        turn = nexts - seen
        seen |= turn


def _is_blind(call: Call) -> bool:
    """True if the call does the same whatever the value is: no unknown call needs to happen just before it."""
    return call.kind == "set" or (call.kind == "delete" and call.result is UNKNOWN)


def _minimal(possible: Iterable[_Possibility]) -> set[_Possibility]:
    """Drops each possibility of which another has the value and the known calls, and needs fewer unknown ones."""
    alike: defaultdict[tuple[object, frozenset[Call]], set[frozenset[Call]]] = defaultdict(set)
    for value, done, perhaps in possible:
        alike[value, done].add(perhaps)
    return {
        _Possibility(value, done, perhaps)
        for (value, done), needs in alike.items()
        for perhaps in needs
        if not any(fewer < perhaps for fewer in needs)
    }


def _refusal(
    key: str, call: Call, possible: set[_Possibility], is_open: Iterable[Call], returned: Sequence[Call]
) -> str:
    values = sorted({repr(each.value) for each in possible})
    return "\n  ".join(
        [
            f"key {key!r}: no order of the calls gives this result:",
            str(call),
            f"before it the key holds {' or '.join(values)}, with some of these calls done:",
            *(str(other) for other in is_open if other is not call),
            "the last calls that had returned:",
            *map(str, returned[-8:]),
        ]
    )


def overlapping(history: Iterable[Call]) -> int:
    """Returns how many calls ran while another client's call for the same key did."""
    by_key: defaultdict[str, list[Call]] = defaultdict(list)
    for call in history:
        by_key[call.key].append(call)
    return sum(
        any(a.began < b.ended and b.began < a.ended for b in calls if b.client != a.client)
        for calls in by_key.values()
        for a in calls
    )
