"""The checker of histories: it accepts what some order of the calls explains, and refuses everything else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from support.histories import FOREVER, UNKNOWN, Call, check, is_right, overlapping


def call(client: str, kind: str, *arguments: object, at: tuple[float, float], result: object = None) -> Call:
    return Call(client, kind, "k", arguments, result, *at)


def unknown(client: str, kind: str, *arguments: object, at: float) -> Call:
    return Call(client, kind, "k", arguments, UNKNOWN, at)


GOOD = {
    "nothing": [],
    "a read of a missing key": [call("a", "get", at=(0, 1))],
    "a read beside a write sees the value before it": [
        call("a", "set", 1, at=(0, 3)),
        call("b", "get", at=(1, 2), result=None),
    ],
    "a read beside a write sees the value after it": [
        call("a", "set", 1, at=(0, 3)),
        call("b", "get", at=(1, 2), result=1),
    ],
    "two writes side by side, seen in one order": [
        call("a", "set", 1, at=(0, 5)),
        call("b", "set", 2, at=(0, 5)),
        call("c", "get", at=(1, 2), result=2),
        call("c", "get", at=(3, 4), result=1),
    ],
    "an unknown write that never happened": [
        unknown("a", "set", 1, at=0),
        call("b", "get", at=(1, 2)),
    ],
    "an unknown write that takes effect late": [
        unknown("a", "set", 1, at=0),
        call("b", "get", at=(1, 2)),
        call("b", "set", 2, at=(3, 4)),
        call("b", "get", at=(5, 6), result=2),
        call("b", "get", at=(7, 8), result=1),
    ],
    "two unknown additions, of which one happened": [
        unknown("a", "add", 1, at=0),
        unknown("b", "add", 10, at=0),
        call("c", "add", 100, at=(1, 2), result=110),
    ],
    "alike calls are several": [
        call("a", "add", 1, at=(0, 2), result=1),
        call("a", "add", 1, at=(0, 2), result=2),
        call("b", "add", 0, at=(3, 4), result=2),
    ],
    "a swap of a missing key": [
        call("a", "compare_set", None, 1, at=(0, 1), result=(True, 1)),
        call("b", "compare_set", None, 2, at=(2, 3), result=(False, 1)),
        call("b", "delete", at=(4, 5), result=True),
        call("b", "delete", at=(6, 7), result=False),
    ],
}

BAD = {
    "a stale read": [
        call("a", "set", 1, at=(0, 1)),
        call("a", "set", 2, at=(2, 3)),
        call("b", "get", at=(4, 5), result=1),
    ],
    "a read that goes back": [
        call("a", "set", 1, at=(0, 9)),
        call("b", "get", at=(1, 2), result=1),
        call("c", "get", at=(3, 4), result=None),
    ],
    "two readers see two orders": [
        call("a", "set", 1, at=(0, 9)),
        call("b", "set", 2, at=(0, 9)),
        call("c", "get", at=(1, 2), result=1),
        call("d", "get", at=(3, 4), result=2),
        call("c", "get", at=(5, 6), result=1),
    ],
    "a lost update": [
        call("a", "add", 1, at=(0, 2), result=1),
        call("b", "add", 1, at=(1, 3), result=1),
    ],
    "a lost write": [
        call("a", "set", 1, at=(0, 1)),
        call("b", "get", at=(2, 3), result=None),
    ],
    "an unknown write before it began": [
        call("b", "get", at=(0, 1), result=1),
        unknown("a", "set", 1, at=2),
    ],
    "an unknown addition that counts twice": [
        unknown("a", "add", 1, at=0),
        call("b", "add", 0, at=(1, 2), result=2),
    ],
    "two swaps that both succeed": [
        call("a", "compare_set", None, 1, at=(0, 3), result=(True, 1)),
        call("b", "compare_set", None, 2, at=(1, 2), result=(True, 2)),
    ],
    "a write that takes effect twice": [
        call("a", "set", 1, at=(0, 9)),
        call("b", "get", at=(1, 2), result=1),
        call("b", "set", 2, at=(3, 4)),
        call("b", "get", at=(5, 6), result=1),
    ],
}


@pytest.mark.parametrize("name", GOOD)
def test_histories_that_some_order_explains_are_accepted(name: str) -> None:
    assert check(GOOD[name]) == []


@pytest.mark.parametrize("name", BAD)
def test_histories_that_no_order_explains_are_refused(name: str) -> None:
    (refusal,) = check(BAD[name])
    assert "no order of the calls gives this result" in refusal


def test_each_key_is_checked_separately() -> None:
    history = [
        *BAD["a stale read"],
        Call("a", "set", "other", (7,), None, 0, 1),
        Call("a", "get", "other", (), 7, 2, 3),
    ]
    assert ["key 'k'" in text for text in check(history)] == [True]
    assert check([Call("a", "get", "k", (), 5, 0, 1)], first=5) == []


def test_calls_that_overlap_are_counted() -> None:
    history = GOOD["two writes side by side, seen in one order"]
    assert overlapping(history) == 4
    assert overlapping(BAD["a stale read"]) == 0
    assert overlapping(GOOD["an unknown write that never happened"]) == 2


def by_brute_force(history: Sequence[Call]) -> bool:
    """Tries all orders of all calls, with and without each unknown one."""
    known = [each for each in history if each.result is not UNKNOWN]
    others = [each for each in history if each.result is UNKNOWN]
    for count in range(len(others) + 1):
        for chosen in itertools.combinations(others, count):
            if any(explains(order) for order in itertools.permutations([*known, *chosen])):
                return True
    return False


def explains(order: Sequence[Call]) -> bool:
    value: object = None
    latest = 0.0
    for each in order:
        latest = max(latest, each.began)
        right, value = is_right(each, value)
        if not right or each.ended < latest:
            return False
    return True


def a_history(rng: random.Random) -> list[Call]:
    """Calls at random; their results are those of some order, or nearly so."""
    calls = []
    for n in range(rng.randrange(3, 7)):
        began = rng.uniform(0, 10)
        ended = began + rng.choice((1, 3, 6))
        kind, arguments = rng.choice(
            (
                ("get", ()),
                ("set", (n,)),
                ("add", (1,)),
                ("delete", ()),
                ("compare_set", (rng.choice((None, 0, 1)), n)),
            )
        )
        calls.append(Call(f"c{n}", kind, "k", arguments, UNKNOWN, began, ended))
    told: list[Call] = []
    value: object = None
    for each in sorted(calls, key=lambda each: rng.uniform(each.began, each.ended)):
        if rng.random() < 0.2:  # nobody knows; it happens, or not
            told.append(Call(each.client, each.kind, "k", each.arguments, UNKNOWN, each.began, FOREVER))
            value = is_right(each, value)[1] if rng.random() < 0.5 else value
            continue
        result, value = result_of(each, value)
        if rng.random() < 0.3 and each.kind in ("get", "add"):
            result = rng.randrange(7)
        told.append(Call(each.client, each.kind, "k", each.arguments, result, each.began, each.ended))
    return told


def result_of(each: Call, value: object) -> tuple[object, object]:
    after = is_right(each, value)[1]
    results = {
        "get": value,
        "set": None,
        "add": after,
        "delete": value is not None,
        "compare_set": (each.arguments[:1] == (value,), after),
    }
    return results[each.kind], after


def test_the_checker_agrees_with_brute_force_on_small_histories() -> None:
    rng = random.Random(7)
    verdicts = []
    for _ in range(3000):
        history = a_history(rng)
        verdicts.append(by_brute_force(history))
        assert (check(history) == []) == verdicts[-1], "\n".join(map(str, history))
    assert 500 < verdicts.count(False) < 2500
