"""Programs compute what their collective says, keep the pace, and come to an end on links that hold little."""

from collections import deque
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.collectives.simulate import Rank, add, advance, leaves, run

from paceline._collectives import program as programs
from paceline._collectives.program import AHEAD, Area, Do, Program
from paceline._collectives.rows import Nodes, SumRule, chunk_bounds
from paceline._collectives.schedules import SCHEDULES

REDUCING = [(kind, name) for kind in ("all_reduce", "reduce", "reduce_scatter") for name in SCHEDULES[kind]]


def reducing(
    kind: str,
    name: str,
    rank: int,
    world: int,
    root: int,
    n: int,
    segment: int,
    nodes: Nodes = (),
) -> Program:
    if kind == "reduce":
        return programs.reduce_program(name, rank, world, root, n, segment)
    if kind == "all_reduce":
        return programs.all_reduce_program(name, rank, world, n, segment, nodes)
    return programs.reduce_scatter_program(name, rank, world, n, segment)


@settings(max_examples=600, deadline=None)
@given(
    how=st.sampled_from(REDUCING),
    world=st.integers(1, 9),
    n=st.integers(0, 24),
    segment=st.integers(1, 9),
    in_place=st.booleans(),
    lend=st.booleans(),
    data=st.data(),
)
def test_reduction_programs_combine_the_value_of_each_rank_once(
    how: tuple[str, str], world: int, n: int, segment: int, in_place: bool, lend: bool, data: Any
) -> None:
    kind, name = how
    root = data.draw(st.integers(0, world - 1))
    picks = data.draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=30))
    in_place = in_place and kind != "reduce_scatter"
    nodes = tuple(data.draw(st.lists(st.integers(0, 3), min_size=world, max_size=world) | st.just([])))
    ranks = []
    for r in range(world):
        base = [f"{r}.{i}" for i in range(n)]
        size = n
        if kind == "reduce_scatter":
            lo, hi = chunk_bounds(n, world)[r]
            size = hi - lo
        out = base if in_place else ["unset"] * size
        ranks.append(Rank(reducing(kind, name, r, world, root, n, segment, nodes), base, out))
    run(ranks, capacity=AHEAD, lend=lend, pick=lambda step: picks[step % len(picks)])
    for r, rank in enumerate(ranks):
        if kind == "reduce" and r != root:
            continue
        lo, hi = chunk_bounds(n, world)[r] if kind == "reduce_scatter" else (0, n)
        for i, value in zip(range(lo, hi), rank.memory[Area.OUT], strict=True):
            assert leaves(value) == sorted(f"{r}.{i}" for r in range(world)), "each rank's value, once"
            if world > 1:
                assert value[0] == "/", "and then it is finished"
            if SCHEDULES[kind][name].sums is SumRule.IN_RANK_ORDER and world > 1:
                assert value == ("/", in_rank_order(world, i))
        if kind == "all_reduce":
            assert rank.memory[Area.OUT] == ranks[0].memory[Area.OUT], "the same expression, so the same bits"


def in_rank_order(world: int, i: int) -> Any:
    *_, total = accumulate((f"{r}.{i}" for r in range(world)), add)
    return total


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(list(SCHEDULES["broadcast"])),
    world=st.integers(1, 17),
    n=st.integers(0, 60),
    segment=st.integers(1, 9),
    lend=st.booleans(),
)
def test_broadcast_programs_give_all_ranks_the_values_of_the_root(
    data: Any, name: str, world: int, n: int, segment: int, lend: bool
) -> None:
    root = data.draw(st.integers(0, world - 1))
    ranks = []
    for r in range(world):
        values = [f"{r}.{i}" for i in range(n)]
        ranks.append(Rank(programs.broadcast_program(name, r, world, root, n, segment), values, values))
    run(ranks, lend=lend)
    assert all(rank.memory[Area.OUT] == [f"{root}.{i}" for i in range(n)] for rank in ranks)


def test_every_broadcast_schedule_has_the_same_first_source() -> None:
    for world in range(2, 18):
        for rank in range(world):
            sources = set()
            for name in SCHEDULES["broadcast"]:
                moves = programs.broadcast_program(name, rank, world, 1, 40, 3).moves
                sources.add(next((move.peer for move in moves if move.do is not Do.SEND), None))
            assert len(sources) == 1


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(["all_gather direct", "all_gather ring", "all_gather bruck", "gather", "scatter"]),
    world=st.integers(1, 17),
    segment=st.integers(1, 5),
    lend=st.booleans(),
)
def test_gather_and_scatter_programs_put_rows_of_every_rank_in_place(
    data: Any, kind: str, world: int, segment: int, lend: bool
) -> None:
    root = data.draw(st.integers(0, world - 1))
    sizes = tuple(data.draw(st.lists(st.integers(0, 12), min_size=world, max_size=world)))
    kind, _, name = kind.partition(" ")
    n = sizes[0]
    ranks = []
    for r in range(world):
        mine = [f"{r}.{i}" for i in range(sizes[r])]
        if kind == "scatter":
            every = [f"{c}.{i}" for c in range(world) for i in range(n)]
            program = programs.scatter_program(r, world, root, n, segment)
            ranks.append(Rank(program, every if r == root else [], ["unset"] * n))
        elif kind == "gather":
            out = ["unset"] * sum(sizes) if r == root else []
            ranks.append(Rank(programs.gather_program(r, world, root, sizes, segment), mine, out))
        else:
            out = ["unset"] * sum(sizes)
            if name == "bruck":
                lo = sum(sizes[:r])
                out[lo : lo + sizes[r]] = mine
            program = programs.all_gather_program(name, r, world, sizes, segment)
            ranks.append(Rank(program, mine, out))
    run(ranks, lend=lend)
    everything = [f"{r}.{i}" for r in range(world) for i in range(sizes[r])]
    for r, rank in enumerate(ranks):
        if kind == "scatter":
            assert rank.memory[Area.OUT] == [f"{r}.{i}" for i in range(n)]
        elif kind == "all_gather" or r == root:
            assert rank.memory[Area.OUT] == everything


@settings(max_examples=100, deadline=None)
@given(data=st.data(), world=st.integers(1, 8), segment=st.integers(1, 5), lend=st.booleans())
def test_all_to_all_programs_deliver_the_elements_of_each_pair(data: Any, world: int, segment: int, lend: bool) -> None:
    counts = [data.draw(st.lists(st.integers(0, 30), min_size=world, max_size=world)) for _ in range(world)]
    ranks = []
    for r in range(world):
        received = tuple(counts[s][r] for s in range(world))
        base = [f"{r}->{d}.{i}" for d in range(world) for i in range(counts[r][d])]
        program = programs.all_to_all_program(r, world, tuple(counts[r]), received, segment)
        ranks.append(Rank(program, base, ["unset"] * sum(received)))
    run(ranks, lend=lend)
    for r, rank in enumerate(ranks):
        assert rank.memory[Area.OUT] == [f"{s}->{r}.{i}" for s in range(world) for i in range(counts[s][r])]


@pytest.mark.parametrize("name", list(SCHEDULES["barrier"]))
@pytest.mark.parametrize("world", range(1, 18))
def test_no_rank_passes_a_barrier_before_all_have_entered(name: str, world: int) -> None:
    """Nobody is through before all have begun, whoever comes last."""
    for last in range(world):
        ranks = [Rank(programs.barrier_program(name, rank, world), [], []) for rank in range(world)]
        ranks[last].todo.clear()
        advance(ranks, capacity=1)
        assert all(rank.todo for rank in ranks if rank is not ranks[last])
    run([Rank(programs.barrier_program(name, rank, world), [], []) for rank in range(world)], capacity=1)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), world=st.integers(1, 6), count=st.integers(1, 6))
def test_consecutive_programs_on_the_same_links_do_not_deadlock(data: Any, world: int, count: int) -> None:
    """Ranks may be in different operations at once; links that hold `AHEAD` frames must be enough still."""
    calls = []
    for _ in range(count):
        kind = data.draw(st.sampled_from(list(SCHEDULES)))
        name = data.draw(st.sampled_from(list(SCHEDULES[kind])))
        calls.append((kind, name, data.draw(st.integers(0, 40)), data.draw(st.integers(0, world - 1))))
    ranks = []
    for rank in range(world):
        size = 40 * world
        whole = Rank(Program((), (), 80, lend=True), ["x"] * size, ["y"] * size)
        whole.todo = deque(move._replace(part=0) for call in calls for move in program(call, rank, world).moves)
        ranks.append(whole)
    turns = data.draw(st.lists(st.integers(0, world - 1), min_size=1, max_size=30))
    wires: dict[tuple[int, int], int] = {}
    moved, turn = True, 0
    while moved:
        moved = False
        for at in [turns[turn % len(turns)], *range(world)]:
            while ranks[at].todo:
                move = ranks[at].todo[0]
                wire, change = ((at, move.peer), 1) if move.do is Do.SEND else ((move.peer, at), -1)
                if not 0 <= wires.get(wire, 0) + change <= AHEAD:
                    break
                wires[wire] = wires.get(wire, 0) + change
                ranks[at].todo.popleft()
                moved = True
        turn += 1
    assert not any(rank.todo for rank in ranks), f"{calls} come to a stop"


def program(call: tuple[str, str, int, int], rank: int, world: int) -> Program:
    """The program of a call with segments of one element."""
    kind, name, n, root = call
    sizes = tuple((n + 3 * r) % 11 for r in range(world))
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        return reducing(kind, name, rank, world, root, n, 1)
    if kind == "broadcast":
        return programs.broadcast_program(name, rank, world, root, n, 1)
    if kind == "scatter":
        return programs.scatter_program(rank, world, root, n, 1)
    if kind == "gather":
        return programs.gather_program(rank, world, root, sizes, 1)
    if kind == "all_gather":
        return programs.all_gather_program(name, rank, world, sizes, 1)
    if kind == "all_to_all":
        sent = tuple((n * rank + d) % 13 for d in range(world))
        received = tuple((n * s + rank) % 13 for s in range(world))
        return programs.all_to_all_program(rank, world, sent, received, 1)
    return programs.barrier_program(name, rank, world)


@pytest.mark.parametrize(("world", "n", "segment"), [(2, 1000, 7), (5, 1003, 4), (7, 64, 1)])
def test_ring_limits_frames_in_flight_and_overlaps_receiving(world: int, n: int, segment: int) -> None:
    for rank in range(world):
        sent = received = 0
        first_receive = None
        for i, move in enumerate(programs.all_reduce_program("ring", rank, world, n, segment).moves):
            if move.do is Do.SEND:
                sent += 1
            else:
                first_receive = first_receive if first_receive is not None else i
                received += 1
            assert sent - received <= AHEAD + 1, "one more where two chunks differ by a segment"
        assert first_receive <= AHEAD, "it receives while most of the first chunk is still to be sent"


def test_a_tree_forwards_each_segment_as_it_arrives() -> None:
    moves = programs.broadcast_program("tree", 1, 4, 0, 40, 10).moves
    assert [move.do for move in moves] == [Do.STORE, Do.SEND] * 4


def test_a_ring_reduce_scatter_needs_little_scratch_memory() -> None:
    assert programs.reduce_scatter_program("ring", 3, 16, 1600, 10).scratch <= 2 * 100


def test_chunks_that_fit_one_segment_are_sent_as_one_frame() -> None:
    halving = programs.all_reduce_program("halving_doubling", 0, 8, 800, 1000).moves
    assert [move.n for move in halving if move.do is Do.SEND] == [400, 200, 100, 100, 200, 400]


def test_programs_are_cached() -> None:
    first, second = (programs.all_reduce_program("ring", 0, 4, 1 << 20, 1 << 18) for _ in range(2))
    assert first is second
