"""Runs of arrays: whatever is held by whom, each wanted element is filled once, or named as missing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._elastic.reshard_plan import ElementRun, assign, fill
from paceline.checkpoint.pieces import Shard
from paceline_protocol import WHOLE as WHOLE_SHARE
from paceline_protocol import Share

SIZE = 20
WHOLE = np.arange(100, 100 + SIZE)
spans = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(lambda pair: (min(pair), max(pair) - min(pair)))


def shard(start: int, count: int) -> Shard:
    return Shard(WHOLE[start : start + count].copy(), start, (4, 5))


def inside(runs: list[ElementRun]) -> list[int]:
    return sorted(n for run in runs for n in range(run.start, run.start + run.count))


@given(target=spans, sources=st.lists(spans, max_size=4))
def test_fill_copies_local_elements_and_returns_the_missing_ones(
    target: tuple[int, int], sources: list[tuple[int, int]]
) -> None:
    start, count = target
    into = Shard(np.zeros(count, int), start, (4, 5))
    missing = fill({"a": into}, [{"a": shard(*source)} for source in sources] + [{"b": shard(0, SIZE)}])
    here = {n for first, size in sources for n in range(first, first + size)}
    expected = [n for n in range(start, start + count) if n not in here]
    assert inside(missing) == expected
    assert all(run.count for run in missing)
    assert into.values.tolist() == [0 if n in expected else WHOLE[n] for n in range(start, start + count)]


PLACE = 3
"""Of the array in the flat array that is cut."""
FLAT = PLACE + SIZE + 4
shares_ = st.integers(1, 30).flatmap(lambda parts: st.builds(Share, st.integers(0, parts - 1), st.just(parts)))


def cut(parts: int) -> dict[str, tuple[int, int]]:
    return {"a": (PLACE, -(-FLAT // parts))}


def elements_of(share: Share) -> set[int]:
    place, size = cut(share.parts)["a"]
    return set(range(share.part * size - place, (share.part + 1) * size - place)) & set(range(SIZE))


@given(wanted=st.lists(spans, max_size=3), held=st.lists(st.lists(shares_, max_size=2), max_size=5))
def test_assign_requests_each_element_once_from_a_holder(
    wanted: list[tuple[int, int]], held: list[list[Share]]
) -> None:
    missing = [ElementRun("a", start, count) for start, count in wanted if count]
    anywhere = {n for shares in held for share in shares for n in elements_of(share)}
    lacking = set(inside(missing)) - anywhere
    try:
        given_ = assign(missing, dict(enumerate(held)), cut)
    except LookupError as error:
        (run,) = error.args
        assert run.count
        assert set(inside([run])) <= lacking
        return
    assert not lacking
    assert inside([run for runs in given_.values() for run in runs]) == inside(missing)
    for holder, runs in given_.items():
        for run in runs:
            assert any(set(inside([run])) <= elements_of(share) for share in held[holder])


def test_assign_spreads_runs_evenly_over_equal_holders() -> None:
    missing = [ElementRun(name, 0, 10) for name in "abcd"]
    found = assign(missing, {"one": [WHOLE_SHARE], "other": [WHOLE_SHARE]}, lambda _: dict.fromkeys("abcd", (0, 10)))
    assert [len(runs) for runs in found.values()] == [2, 2]


def test_assign_raises_lookup_error_for_elements_without_a_holder() -> None:
    with pytest.raises(LookupError) as caught:
        assign([ElementRun("a", 3, 4)], {}, cut)
    assert str(caught.value.args[0]) == "elements 3 to 6 of a"
    with pytest.raises(LookupError) as caught:
        assign([ElementRun("a", 0, SIZE)], {"one": [Share(0, 3)]}, cut)
    assert str(caught.value.args[0]) == "elements 6 to 14 of a", "9 in each part, 3 lie before"


def test_assign_computes_the_cut_once_for_a_thousand_members() -> None:
    parts = 1000
    asked: list[int] = []

    def count_cuts(number: int) -> dict[str, tuple[int, int]]:
        asked.append(number)
        return {f"a{n}": (0, 1) for n in range(parts)}

    held = {rank: [Share(rank, parts)] for rank in range(parts)}
    found = assign([ElementRun(f"a{n}", n, 1) for n in range(parts)], held, count_cuts)
    assert asked == [parts]
    assert [len(runs) for runs in found.values()] == [1] * parts
