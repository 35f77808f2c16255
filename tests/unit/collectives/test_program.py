"""Programs keep the pace, come to an end on links that hold little, and compute what their schedule says."""

from collections import defaultdict, deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives.program import (
    AHEAD,
    Do,
    Program,
    all_reduce_program,
    barrier_program,
    broadcast_program,
)


def carry_out(programs: list[Program], base: Any, out: Any, capacity: int = AHEAD) -> Any:
    """Runs all ranks, one thread each in effect, over links that hold `capacity` frames; a value is a set of ranks.

    `base[rank][i]` and `out[rank][i]` may be the same lists: in place.
    """
    todo = [deque(program.moves) for program in programs]
    wires = defaultdict(deque)
    parts = defaultdict(int)
    moved = True
    while moved:
        moved = False
        for rank, moves in enumerate(todo):
            while moves:
                do, peer, part, lo, hi, fresh = moves[0]
                if do is Do.SEND:
                    if len(wires[rank, peer]) >= capacity:
                        break
                    wires[rank, peer].append((part, [list(v) for v in (base if fresh else out)[rank][lo:hi]]))
                else:
                    if not wires[peer, rank]:
                        break
                    sent_part, values = wires[peer, rank].popleft()
                    assert sent_part == part
                    assert len(values) == hi - lo
                    if do is not Do.STORE:
                        own = (base if fresh else out)[rank][lo:hi]
                        values = [a + b for a, b in zip(values, own, strict=True)]
                    out[rank][lo:hi] = values
                way = (rank, peer, do is Do.SEND)
                assert part == parts[way]
                parts[way] += 1
                moves.popleft()
                moved = True
    assert not any(todo), "the program comes to a stop"
    assert not any(wires.values())


@settings(max_examples=150, deadline=None)
@given(
    schedule=st.sampled_from(["ring", "star"]),
    world=st.integers(1, 9),
    n=st.integers(0, 120),
    segment=st.integers(1, 9),
    in_place=st.booleans(),
)
def test_all_reduce(schedule: str, world: int, n: int, segment: int, in_place: bool) -> None:
    programs = [all_reduce_program(schedule, rank, world, n, segment) for rank in range(world)]
    base = [[[rank] for _ in range(n)] for rank in range(world)]
    out = base if in_place else [[["unset"]] * n for _ in range(world)]
    carry_out(programs, base, out)
    for rank in range(world):
        assert programs[rank].covered == (world > 1)
        if world > 1:
            assert out[rank] == out[0]
            assert all(sorted(value) == list(range(world)) for value in out[rank])
        if not in_place:
            assert base[rank] == [[rank]] * n, "the argument is never written to"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), world=st.integers(1, 9), n=st.integers(0, 60), segment=st.integers(1, 9))
def test_broadcast(data: Any, world: int, n: int, segment: int) -> None:
    root = data.draw(st.integers(0, world - 1))
    programs = [broadcast_program(rank, world, root, n, segment) for rank in range(world)]
    base = [[[rank, i] for i in range(n)] for rank in range(world)]
    carry_out(programs, base, base)
    assert all(values == [[root, i] for i in range(n)] for values in base)


@pytest.mark.parametrize("world", range(1, 18))
def test_barrier(world: int) -> None:
    programs = [barrier_program(rank, world) for rank in range(world)]
    carry_out(programs, [[] for _ in programs], [[] for _ in programs], capacity=1)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), world=st.integers(1, 6), count=st.integers(1, 6))
def test_one_program_after_another_on_the_same_links(data: Any, world: int, count: int) -> None:
    """Ranks may be in different operations at once; links that hold `AHEAD` frames must be enough still."""
    calls = []
    for _ in range(count):
        kind = data.draw(st.sampled_from(["ring", "star", "broadcast", "barrier"]))
        calls.append((kind, data.draw(st.integers(0, 40)), data.draw(st.integers(0, world - 1))))

    def program(call: tuple[str, int, int], rank: int) -> Program:
        kind, n, root = call
        if kind == "barrier":
            return barrier_program(rank, world)
        if kind == "broadcast":
            return broadcast_program(rank, world, root, n, 1)
        return all_reduce_program(kind, rank, world, n, 1)

    todo = [deque(move for call in calls for move in program(call, rank).moves) for rank in range(world)]
    wires: dict[tuple[int, int], int] = defaultdict(int)
    moved = True
    while moved:
        moved = False
        rank = data.draw(st.integers(0, world - 1))  # whoever is run first; then all others
        for at in [rank, *range(world)]:
            while todo[at]:
                move = todo[at][0]
                wire, change = ((at, move.peer), 1) if move.do is Do.SEND else ((move.peer, at), -1)
                if not 0 <= wires[wire] + change <= AHEAD:
                    break
                wires[wire] += change
                todo[at].popleft()
                moved = True
    assert not any(todo), f"{calls} come to a stop"


@pytest.mark.parametrize(("world", "n", "segment"), [(2, 1000, 7), (5, 1003, 4), (7, 64, 1)])
def test_a_ring_is_never_far_ahead_and_overlaps(world: int, n: int, segment: int) -> None:
    for rank in range(world):
        sent = received = 0
        first_receive = None
        for i, move in enumerate(all_reduce_program("ring", rank, world, n, segment).moves):
            if move.do is Do.SEND:
                sent += 1
            else:
                first_receive = first_receive if first_receive is not None else i
                received += 1
            assert sent - received <= AHEAD + 1, "one more where two chunks differ by a segment"
        assert first_receive <= AHEAD, "it receives while most of the first chunk is still to be sent"


def test_a_tree_passes_segments_on_as_they_come() -> None:
    moves = broadcast_program(1, 4, 0, 40, 10).moves
    assert [move.do for move in moves] == [Do.STORE, Do.SEND] * 4


def test_programs_are_made_once() -> None:
    assert all_reduce_program("ring", 0, 4, 1 << 20, 1 << 18) is all_reduce_program("ring", 0, 4, 1 << 20, 1 << 18)
