"""The pure parts of FSDP: who stands where, which elements they hold, and which unit comes next."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._links.base import Peer
from paceline._parallel import ShardingStrategy
from paceline._parallel.sharding._placement import FlatLayout, Placement, place
from paceline._parallel.sharding._runner import UnitOrder
from paceline.errors import InvalidWorldSize

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=6)
worlds = st.integers(1, 12)
orders = st.lists(st.integers(0, 5), max_size=12)
Strategy = ShardingStrategy


def members(*hosts: str) -> list[Peer]:
    return [Peer(rank, f"m{rank}", host) for rank, host in enumerate(hosts)]


# FlatLayout.


@given(shapes, worlds)
def test_shards_cover_the_flat_array_once(shapes: list[tuple[int, ...]], world: int) -> None:
    layout = FlatLayout(shapes, world)
    assert layout.size == sum(map(prod, shapes))
    assert layout.padded == world * layout.shard_size
    assert 0 <= layout.padded - layout.size < world  # the smallest part that will do
    covered = [i for rank in range(world) for i in range(layout.padded)[layout.own(rank)]]
    assert covered == list(range(layout.padded))


@given(shapes, worlds)
def test_parameters_are_contiguous_in_the_flat_array(shapes: list[tuple[int, ...]], world: int) -> None:
    layout = FlatLayout(shapes, world)
    assert [place.stop - place.start for place in layout.places] == [prod(shape) for shape in shapes]
    assert [i for place in layout.places for i in range(place.start, place.stop)] == list(range(layout.size))


@given(shapes, worlds)
def test_pieces_have_every_element_of_every_parameter_once(shapes: list[tuple[int, ...]], world: int) -> None:
    layout = FlatLayout(shapes, world)
    held: list[list[int]] = [[] for _ in shapes]
    for rank in range(world):
        own, pieces, starts = layout.own(rank), layout.pieces(rank), layout.starts(rank)
        assert len(pieces) == len(starts) == len(shapes)
        for number, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
            count = piece.stop - piece.start
            assert 0 <= piece.start <= piece.stop <= layout.shard_size
            assert start >= 0
            if count:  # by way of the flat array, and by way of the parameter
                assert own.start + piece.start == layout.places[number].start + start
            else:
                assert start == 0
            held[number] += range(start, start + count)
    assert held == [list(range(prod(shape))) for shape in shapes]


@pytest.mark.parametrize(
    ("shapes", "world", "part", "pieces"),
    [
        ([(5,)], 2, 3, [[(0, 3)], [(0, 2)]]),
        ([(1,)], 3, 1, [[(0, 1)], [(0, 0)], [(0, 0)]]),
        ([(0, 3)], 2, 0, [[(0, 0)], [(0, 0)]]),
        ([(), (2, 2), (0,), (1,)], 2, 3, [[(0, 1), (1, 3), (3, 3), (3, 3)], [(0, 0), (0, 2), (2, 2), (2, 3)]]),
        ([], 4, 0, [[], [], [], []]),
    ],
)
def test_layouts_of_known_shapes(
    shapes: list[tuple[int, ...]], world: int, part: int, pieces: list[list[tuple[int, int]]]
) -> None:
    layout = FlatLayout(shapes, world)
    assert layout.shard_size == part
    found = [layout.pieces(rank) for rank in range(world)]
    sizes = [[piece.stop - piece.start for piece in one] for one in found]
    assert sizes == [[stop - start for start, stop in one] for one in pieces]
    for one, expected in zip(found, pieces, strict=True):
        for piece, (start, stop) in zip(one, expected, strict=True):
            assert start == stop or (piece.start, piece.stop) == (start, stop)


# UnitOrder.


def test_a_new_unit_order_predicts_by_its_initial_guess() -> None:
    order = UnitOrder([2, 0, 1])
    assert [order.first(n) for n in (0, 1, 2, 9)] == [[], [2], [2, 0], [2, 0, 1]]
    order.start()
    assert [order.enter(2, 2), order.enter(0, 2), order.enter(1, 2)] == [[0, 1], [1], []]


def test_a_wrong_guess_ends_the_predictions_of_the_pass() -> None:
    order = UnitOrder([0, 1, 2, 3])
    order.start()
    assert [order.enter(0, 1), order.enter(2, 1), order.enter(1, 1), order.enter(3, 1)] == [[1], [], [], []]


@given(orders, orders, st.integers(0, 4))
def test_unit_order_is_learned_from_a_complete_pass_and_a_commit(
    guess: list[int], units: list[int], count: int
) -> None:
    order = UnitOrder(guess)
    order.start()
    for unit in units:
        assert len(order.enter(unit, count)) <= count
    assert not order.is_complete
    order.end()
    assert order.is_complete
    assert order.first(count) == guess[:count]  # until all ranks know of it
    order.commit()
    assert order.first(count) == units[:count]
    order.start()
    for number, unit in enumerate(units, start=1):
        assert order.enter(unit, count) == units[number : number + count]
    order.end()


@given(orders, orders, st.integers(1, 4))
def test_an_incomplete_pass_does_not_change_the_unit_order(guess: list[int], units: list[int], count: int) -> None:
    order = UnitOrder(guess)
    order.start()
    for unit in units:
        order.enter(unit, count)
    order.start()  # the pass before had no end
    assert order.first(count) == guess[:count]
    for number, unit in enumerate(guess, start=1):
        assert order.enter(unit, count) == guess[number : number + count]


@given(orders, orders, st.integers(1, 3))
def test_predictions_depend_only_on_the_units_entered(guess: list[int], units: list[int], count: int) -> None:
    """So that all ranks fetch the same."""
    told = []
    for _ in range(2):
        order = UnitOrder(guess)
        order.start()
        told.append([order.enter(unit, count) for unit in units])
    assert told[0] == told[1]
    assert UnitOrder(guess).enter(9, count) == []


def test_unit_order_copies_the_initial_list() -> None:
    guess = [0, 1]
    order = UnitOrder(guess)
    guess.append(2)
    assert order.first(5) == [0, 1]


# Strategy.


def placed(strategy: Strategy, hosts: list[str], size: int | None = None) -> list[Placement]:
    peers = members(*hosts)
    return [place(strategy, rank, peers, size) for rank in range(len(hosts))]


@given(st.sampled_from(Strategy), st.integers(1, 4), st.integers(1, 4))
def test_shards_and_replicas_form_one_grid_on_every_rank(strategy: Strategy, size: int, nodes: int) -> None:
    """Shards and replicas are the rows and columns of one rectangle."""
    world = size * nodes
    places = placed(strategy, ["h"] * world, size if strategy is Strategy.HYBRID_SHARD else None)
    for rank, mine in enumerate(places):
        assert mine.shards[mine.shard] == rank
        assert rank in mine.replicas
        assert set(mine.shards) & set(mine.replicas) == {rank}
        assert len(mine.shards) * len(mine.replicas) == world
        assert all(places[other].shards == mine.shards for other in mine.shards)
        assert all(places[other].replicas == mine.replicas for other in mine.replicas)
        assert all(places[other].shard == mine.shard for other in mine.replicas)
        assert list(mine.replicas) == sorted(mine.replicas)
    if strategy is Strategy.HYBRID_SHARD:
        assert {len(mine.shards) for mine in places} == {size}


@pytest.mark.parametrize("world", [1, 2, 5])
def test_placement_of_each_strategy(world: int) -> None:
    everyone = tuple(range(world))
    hosts = [f"h{rank}" for rank in range(world)]
    alone = tuple((rank,) for rank in everyone)
    for rank in range(world):
        assert placed(Strategy.FULL_SHARD, hosts)[rank] == Placement(everyone, (rank,), rank, (everyone,), False)
        assert placed(Strategy.SHARD_GRAD_OP, hosts)[rank] == Placement(everyone, (rank,), rank, (everyone,), True)
        assert placed(Strategy.NO_SHARD, hosts)[rank] == Placement((rank,), everyone, 0, alone, True)
        assert placed(Strategy.HYBRID_SHARD, hosts)[rank] == Placement((rank,), everyone, 0, alone, False)
        assert placed(Strategy.HYBRID_SHARD, hosts, world)[rank] == Placement(
            everyone, (rank,), rank, (everyone,), False
        )


def test_hybrid_nodes_are_hosts_in_any_rank_order() -> None:
    places = placed(Strategy.HYBRID_SHARD, ["b", "a", "a", "b"])
    assert [p.shards for p in places] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert [tuple(sorted(p.replicas)) for p in places] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [p.shard for p in places] == [0, 0, 1, 1]


def test_hybrid_nodes_follow_the_node_of_peers_where_known() -> None:
    """As pods do that have host names of their own."""
    peers = [replace(peer, node=node) for peer, node in zip(members("p", "q", "r", "s"), "xyxy", strict=True)]
    nodes = [place(Strategy.HYBRID_SHARD, rank, peers, None).shards for rank in range(4)]
    assert nodes == [(0, 2), (1, 3), (0, 2), (1, 3)]
    unequal = [replace(peer, node="x" if peer.rank else "y") for peer in members("p", "q", "r")]
    with pytest.raises(InvalidWorldSize, match="there are p: 1, q: 2"):
        place(Strategy.HYBRID_SHARD, 0, unequal, None)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_hosts_of_unequal_size_are_refused(hosts: list[str]) -> None:
    counts = {hosts.count(host) for host in hosts}
    if len(counts) == 1:
        assert len(placed(Strategy.HYBRID_SHARD, hosts)) == len(hosts)
    else:
        with pytest.raises(InvalidWorldSize, match="the same number of ranks on each host"):
            placed(Strategy.HYBRID_SHARD, hosts)


@given(st.integers(1, 9), st.integers(-3, 12))
def test_node_sizes_that_do_not_divide_the_world_are_refused(world: int, size: int) -> None:
    if size > 0 and world % size == 0:
        blocks = {p.shards for p in placed(Strategy.HYBRID_SHARD, ["h"] * world, size)}
        assert sorted(blocks) == [tuple(range(n, n + size)) for n in range(0, world, size)]
    else:
        with pytest.raises(InvalidWorldSize, match="multiple of intra_node_size"):
            placed(Strategy.HYBRID_SHARD, ["h"] * world, size)


@pytest.mark.parametrize("strategy", [s for s in Strategy if s is not Strategy.HYBRID_SHARD])
def test_intra_node_size_is_refused_without_hybrid_shard(strategy: Strategy) -> None:
    with pytest.raises(ValueError, match="intra_node_size is for HYBRID_SHARD"):
        placed(strategy, ["h", "h"], 2)
