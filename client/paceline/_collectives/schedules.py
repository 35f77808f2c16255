"""Every schedule: which rank sends which chunk to which rank, step by step; and `SCHEDULES`, which names them all.

A schedule is a function of (rank, world), or of (rank, world, root) if one rank is special, that returns the rows of
one rank (`rows.Row`). To add one, write the function and name it in `SCHEDULES`; `choose.py` says when it is chosen.

The docstring of a schedule that sums gives the order in which it sums an element, because that decides the bits.
"Rank order" is ((x_0 + x_1) + x_2) + ...: the same for every size and world, and for every schedule that uses it.

Letters: r rank, W world size, n elements, c chunk, s step, P the greatest power of two up to W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from paceline._collectives.rows import Action, Nodes, Row, SumRule, ring_neighbours


def star_all_reduce(rank: int, world: int) -> list[Row]:
    """One chunk. All send to rank 0, which sums in rank order and sends the total back: two steps in latency."""
    rows = star_reduce(rank, world, 0)
    if rank != 0:
        return [*rows, Row(1, recv_from=0, recv_chunk=0)]
    return rows + [Row(1, send_to=peer, send_chunk=0) for peer in range(1, world)]


def direct_all_reduce(rank: int, world: int) -> list[Row]:
    """W chunks. Rank c receives chunk c from all, sums in rank order, and sends the total to all.

    Its latency is two steps. Each rank sends 2(W-1)/W of the array, as in the ring, but over all W-1 links at once.
    """
    rows = direct_reduce_scatter(rank, world)
    for s in range(1, world):
        to, source = (rank + s) % world, (rank - s) % world
        rows.append(Row(1, to, rank, source, source))
    return rows


def ring_all_reduce(rank: int, world: int) -> list[Row]:
    """W chunks. Reduce-scatter around the ring, then all-gather: 2(W-1) steps; each rank sends 2(W-1)/W of the array.

    Chunk c is summed in the order ((x_c + x_(c+1)) + ...) + x_(c+W-1), indices modulo W. The last of these ranks,
    (c-1) mod W, owns the total and the others copy it, so all ranks hold the same bits.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    prev, next_ = ring_neighbours(rank, world)
    rows = []
    for s in range(world - 1):
        action = Action.FINALIZE if s == world - 2 else Action.REDUCE
        rows.append(Row(s, next_, (rank - s) % world, prev, (rank - s - 1) % world, action))
    for s in range(world - 1):
        rows.append(Row(world - 1 + s, next_, (rank + 1 - s) % world, prev, (rank - s) % world))
    return rows


def doubling_all_reduce(rank: int, world: int) -> list[Row]:
    """One chunk. Recursive doubling: in step s ranks r and r xor 2^s swap all they hold; log2 P steps, plus 2 if W > P.

    Every rank sums by itself. All sum the same pairs, and a + b has the bits of b + a, so they get the same bits.
    Among the first 2(W-P) ranks, the even ones only hand in their array and get the result.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    core, rows, step, last = _fold_in(rank, world)
    if core is None:
        return rows
    distance = 1
    while distance < power_of_two(world):
        peer = _rank_of(core ^ distance, world)
        distance *= 2
        action = Action.FINALIZE if distance == power_of_two(world) else Action.REDUCE
        rows.append(Row(step, peer, 0, peer, 0, action))
        step += 1
    return rows + ([Row(last, send_to=rank - 1, send_chunk=0)] if _took_one_in(rank, world) else [])


def halving_doubling_all_reduce(rank: int, world: int) -> list[Row]:
    """P chunks. Recursive halving, then recursive doubling: 2 log2 P steps; each rank sends 2(P-1)/P of the array.

    During the halving ranks r and r xor P/2^(s+1) split what they both hold: each hands over one half and sums the
    other. Core rank c ends with the total of chunk c, which all others copy. Ranks beyond P first hand in their whole
    array, as in `doubling_all_reduce`.

    Source: as there; Rabenseifner, "Optimization of collective reduction operations", 2004.
    """
    core, rows, step, last = _fold_in(rank, world, chunks=power_of_two(world))
    if core is None:
        return rows
    half = power_of_two(world) // 2
    first = 0
    while half:
        peer = _rank_of(core ^ half, world)
        mine, theirs = (first + half, first) if core & half else (first, first + half)
        action = Action.REDUCE if half > 1 else Action.FINALIZE
        rows.append(Row(step, peer, theirs, peer, mine, action, half))
        first, half, step = mine, half // 2, step + 1
    held = 1
    while held < power_of_two(world):
        peer = _rank_of(core ^ held, world)
        theirs = first ^ held
        rows.append(Row(step, peer, first, peer, theirs, Action.STORE, held))
        first, held, step = min(first, theirs), held * 2, step + 1
    if _took_one_in(rank, world):
        rows.append(Row(last, send_to=rank - 1, send_chunk=0, span=power_of_two(world)))
    return rows


def star_reduce(rank: int, world: int, root: int) -> list[Row]:
    """One chunk. All send to the root, which sums in rank order."""
    if rank != root:
        return [Row(0, send_to=root, send_chunk=0)]
    return [Row(0, recv_from=peer, recv_chunk=0, action=Action.FOLD) for peer in range(world) if peer != root]


def tree_reduce(rank: int, world: int, root: int) -> list[Row]:
    """One chunk. It flows up the tree of `tree_broadcast`; a rank sums its own, its left and its right subtree."""
    children, parent = tree_children(rank, world, root), tree_parent(rank, world, root)
    rows = [Row(0, recv_from=child, recv_chunk=0, action=Action.REDUCE) for child in children]
    if parent is not None:
        return [*rows, Row(1, send_to=parent, send_chunk=0)]
    return rows[:-1] + [row._replace(action=Action.FINALIZE) for row in rows[-1:]]


def direct_reduce_scatter(rank: int, world: int) -> list[Row]:
    """W chunks. Every rank sends chunk c to rank c, which sums in rank order. The latency is one step."""
    steps = range(1, world)
    return [Row(0, (rank + s) % world, (rank + s) % world, (rank - s) % world, rank, Action.FOLD) for s in steps]


def ring_reduce_scatter(rank: int, world: int) -> list[Row]:
    """W chunks. Chunk c starts at rank c+1 and ends, summed in the order c+1, c+2, ..., c, at its owner, rank c."""
    prev, next_ = ring_neighbours(rank, world)
    rows = []
    for s in range(world - 1):
        action = Action.FINALIZE if s == world - 2 else Action.REDUCE
        rows.append(Row(s, next_, (rank - s - 1) % world, prev, (rank - s - 2) % world, action))
    return rows


def power_of_two(world: int) -> int:
    """Returns the greatest power of two that is not above the world size."""
    return 1 << (world.bit_length() - 1)


def _fold_in(rank: int, world: int, chunks: int = 1) -> tuple[int | None, list[Row], int, int]:
    """Reduces the world to a core whose size is a power of two; ranks outside hand their array to one inside.

    Returns:
        (rank in the core, None for a rank outside; rows so far, all rows for a rank outside; next step; last step).
    """
    steps = power_of_two(world).bit_length() - 1
    extra = world - power_of_two(world)
    last = 1 + steps * (2 if chunks > 1 else 1)
    if rank >= 2 * extra:
        return rank - extra, [], 1, last
    if rank % 2:
        return rank // 2, [Row(0, recv_from=rank - 1, recv_chunk=0, action=Action.REDUCE, span=chunks)], 1, last
    rows = [
        Row(0, send_to=rank + 1, send_chunk=0, span=chunks),
        Row(last, recv_from=rank + 1, recv_chunk=0, span=chunks),
    ]
    return None, rows, 1, last


def _took_one_in(rank: int, world: int) -> bool:
    return rank % 2 == 1 and rank < 2 * (world - power_of_two(world))


def _rank_of(core: int, world: int) -> int:
    """Returns the rank in the world of a rank in the core."""
    extra = world - power_of_two(world)
    return 2 * core + 1 if core < extra else core + extra


def hierarchical_chunks(world: int, nodes: Nodes = ()) -> int:
    """Returns L * H: the first L ranks of a node own a part of the array each, cut into H chunks."""
    by_node = _by_node(world, nodes)
    return len(by_node) * min(map(len, by_node))


def hierarchical_all_reduce(rank: int, world: int, nodes: Nodes = ()) -> list[Row]:
    """L * H chunks. Reduce-scatter within each of H nodes, L parallel all-reduce rings across them, then all-gather.

    The first L ranks of a node own a part each. Rank l sums part l of all ranks of its node; the H owners of part l
    form a ring; then each gives its part to its node. 2(H-1)/H of the array leaves each node, whatever L is. Ranks
    beyond the first L hand in their array and get the result. The nodes' sums are summed in the order of
    `ring_all_reduce`.

    Source: Jia et al., "Highly scalable deep learning training system with mixed-precision", 2018 (hierarchical
    all-reduce), with a ring for each local rank.
    """
    by_node = _by_node(world, nodes)
    count, owners = len(by_node), min(map(len, by_node))
    node = next(h for h, ranks in enumerate(by_node) if rank in ranks)
    local = by_node[node]
    place = local.index(rank)
    rows = list(_within(local, place, owners, count, final=count == 1))
    if place < owners:
        to, source = by_node[(node + 1) % count][place], by_node[(node - 1) % count][place]
        first = place * count
        for s in range(count - 1):
            sent, received = first + (node - s) % count, first + (node - s - 1) % count
            action = Action.FINALIZE if s == count - 2 else Action.REDUCE
            rows.append(Row(1 + s, to, sent, source, received, action))
        for s in range(count - 1):
            sent, received = first + (node + 1 - s) % count, first + (node - s) % count
            rows.append(Row(count + s, to, sent, source, received))
    last = 2 * count - 1
    for s in range(1, len(local)):
        to, at = local[(place + s) % len(local)], (place - s) % len(local)
        if place < owners:
            rows.append(Row(last, send_to=to, send_chunk=place * count, span=count))
        if at < owners:
            rows.append(Row(last, recv_from=local[at], recv_chunk=at * count, span=count))
    return rows


def _within(local: list[int], place: int, owners: int, span: int, *, final: bool) -> Iterator[Row]:
    """Yields the rows of step 0: every rank of a node gives each owner its part."""
    for s in range(1, len(local)):
        at = (place + s) % len(local)
        if at < owners:
            yield Row(0, send_to=local[at], send_chunk=at * span, span=span)
        if place < owners:
            action = Action.FINALIZE if final and s == len(local) - 1 else Action.REDUCE
            source = local[(place - s) % len(local)]
            yield Row(0, recv_from=source, recv_chunk=place * span, action=action, span=span)


def _by_node(world: int, nodes: Nodes) -> list[list[int]]:
    """Returns the ranks of each node; one node with all ranks if nodes are not known."""
    ranks: dict[int, list[int]] = {}
    for rank in range(world):
        ranks.setdefault(nodes[rank] if nodes else 0, []).append(rank)
    return list(ranks.values())


def tree_parent(rank: int, world: int, root: int) -> int | None:
    """Returns the rank that sends to `rank` in `tree_broadcast` and first in `scatter_broadcast`; None for the root."""
    place = (rank - root) % world
    return ((place - 1) // 2 + root) % world if place else None


def tree_children(rank: int, world: int, root: int) -> list[int]:
    """Returns the ranks to which a rank sends in `tree_broadcast`."""
    place = (rank - root) % world
    return [(child + root) % world for child in (2 * place + 1, 2 * place + 2) if child < world]


def tree_broadcast(rank: int, world: int, root: int) -> list[Row]:
    """One chunk. A binary tree, rotated so that the root is its top: floor(log2 W) steps deep."""
    rows = []
    parent = tree_parent(rank, world, root)
    if parent is not None:
        rows.append(Row(0, recv_from=parent, recv_chunk=0))
    return rows + [Row(1, send_to=child, send_chunk=0) for child in tree_children(rank, world, root)]


def scatter_broadcast(rank: int, world: int, root: int) -> list[Row]:
    """W chunks, numbered by place. Scatter down the binary tree, then all-gather around the ring.

    Every link carries about one array. A child gets the chunks of its own subtree, level by level, so the first frame
    comes from the same rank as in `tree_broadcast`: a receiver that knows neither dtype nor shape need not know the
    schedule either.

    Source: van de Geijn, "On global combine operations", 1994, with a tree that needs no power of two.
    """
    place = (rank - root) % world
    rows = []
    parent = tree_parent(rank, world, root)
    if parent is not None:
        rows += [Row(0, recv_from=parent, recv_chunk=first, span=span) for first, span in _levels(place, world)]
    for child in tree_children(rank, world, root):
        rows += [
            Row(1, send_to=child, send_chunk=first, span=span) for first, span in _levels((child - root) % world, world)
        ]
    for s in range(world - 1):
        sent, received = (place - s) % world, (place - s - 1) % world
        # The root holds all chunks and other ranks their subtrees' chunks; a rank is not sent what it holds.
        give = (place + 1) % world != 0 and not _holds((place + 1) % world, sent)
        take = place != 0 and not _holds(place, received)
        row = Row(2 + s)
        if give:
            row = row._replace(send_to=(rank + 1) % world, send_chunk=sent)
        if take:
            row = row._replace(recv_from=(rank - 1) % world, recv_chunk=received)
        if give or take:
            rows.append(row)
    return rows


def direct_scatter(rank: int, world: int, root: int) -> list[Row]:
    """W chunks. The root sends chunk c to rank c."""
    if rank != root:
        return [Row(0, recv_from=root, recv_chunk=rank)]
    return [Row(0, send_to=peer, send_chunk=peer) for peer in range(world) if peer != root]


def _levels(place: int, world: int) -> list[tuple[int, int]]:
    """Returns the places of a subtree, as (first, number) of each level."""
    levels, first, span = [], place, 1
    while first < world:
        levels.append((first, min(span, world - first)))
        first, span = 2 * first + 1, 2 * span
    return levels


def _holds(place: int, chunk: int) -> bool:
    """Returns True if the chunk lies in the subtree of the place."""
    while chunk > place:
        chunk = (chunk - 1) // 2
    return chunk == place


def ring_all_gather(rank: int, world: int) -> list[Row]:
    """W chunks. Each goes around the ring: W-1 steps, two links for each rank."""
    prev, next_ = ring_neighbours(rank, world)
    return [Row(s, next_, (rank - s) % world, prev, (rank - s - 1) % world) for s in range(world - 1)]


def direct_all_gather(rank: int, world: int) -> list[Row]:
    """W chunks. Every rank sends to every other: a latency of one step, W-1 links for each rank."""
    return [Row(0, (rank + s) % world, rank, (rank - s) % world, (rank - s) % world) for s in range(1, world)]


def bruck_all_gather(rank: int, world: int) -> list[Row]:
    """W chunks. In step s rank r sends all that it holds to rank r - 2^s; ceil(log2 W) steps and as many links.

    Source: Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
    1997.
    """
    rows: list[Row] = []
    step, held = 0, 1
    while held < world:
        count = min(held, world - held)
        to, source = (rank - held) % world, (rank + held) % world
        rows += [Row(step, send_to=to, send_chunk=c, span=k) for c, k in _around(rank, count, world)]
        rows += [Row(step, recv_from=source, recv_chunk=c, span=k) for c, k in _around(source, count, world)]
        step, held = step + 1, held + count
    return rows


def direct_gather(rank: int, world: int, root: int) -> list[Row]:
    """W chunks. Rank c sends chunk c to the root."""
    if rank != root:
        return [Row(0, send_to=root, send_chunk=rank)]
    return [Row(0, recv_from=peer, recv_chunk=peer) for peer in range(world) if peer != root]


def pairwise_all_to_all(rank: int, world: int) -> list[Row]:
    """2W chunks at each rank: it sends chunk c to rank c, and receives chunk W + c from rank c."""
    rows = []
    for s in range(1, world):
        to, source = (rank + s) % world, (rank - s) % world
        rows.append(Row(0, to, to, source, world + source))
    return rows


def _around(first: int, count: int, world: int) -> list[tuple[int, int]]:
    """Returns `count` chunks from `first` on, modulo W, as (first, number) of each run."""
    before = min(count, world - first)
    return [(first, before)] + ([(0, count - before)] if count > before else [])


def dissemination_barrier(rank: int, world: int) -> list[Row]:
    """In step s rank r tells rank r + 2^s and hears from rank r - 2^s; ceil(log2 W) steps until it knows of all.

    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
    """
    rows = []
    step, distance = 0, 1
    while distance < world:
        rows.append(Row(step, (rank + distance) % world, 0, (rank - distance) % world, 0))
        step, distance = step + 1, distance * 2
    return rows


def star_barrier(rank: int, world: int) -> list[Row]:
    """All ranks tell rank 0, which then tells all: two steps, and every other rank waits once.

    It suits more ranks than cores: each wait costs a context switch, and this schedule has the fewest.
    """
    if rank:
        return [Row(0, send_to=0, send_chunk=0), Row(1, recv_from=0, recv_chunk=0)]
    others = range(1, world)
    rows = [Row(0, recv_from=peer, recv_chunk=0) for peer in others]
    return rows + [Row(1, send_to=peer, send_chunk=0) for peer in others]


def ring_barrier(rank: int, world: int) -> list[Row]:
    """A token goes around the ring twice: after the first round all have arrived, and the second lets them go.

    It has a latency of 2W steps, and the fewest messages and links: two of each for a rank.
    """
    if world == 1:
        return []
    prev, next_ = ring_neighbours(rank, world)
    give, take = Row(0, send_to=next_, send_chunk=0), Row(0, recv_from=prev, recv_chunk=0)
    wave = (give, take) if rank == 0 else (take, give)
    return [row._replace(step=step) for step, row in enumerate(wave * 2)]


class Schedule(NamedTuple):
    """A schedule of a collective, with its properties.

    Attributes:
        rows: makes the rows from (rank, world), or from (rank, world, root) for a rooted collective.
        chunks: returns the number of chunks for a world size.
        by_node: True if `rows` and `chunks` take the ranks' nodes as a last argument.
        pass_on: False if a segment may leave only after all earlier steps have received (`compile_rows`).
        lend: False if a rank overwrites what it has sent while others may still read it (`Program`).
        sums: where and in which order a schedule that reduces adds elements (`SumRule`).
    """

    rows: Callable[..., list[Row]]
    chunks: Callable[..., int]
    by_node: bool = False
    pass_on: bool = True
    lend: bool = True
    sums: SumRule = SumRule.ONCE


def _one(world: int) -> int:
    return 1


def _all(world: int) -> int:
    return world


def _both(world: int) -> int:
    return 2 * world


SCHEDULES: Mapping[str, Mapping[str, Schedule]] = {
    "all_reduce": {
        # Rank 0 must not send back to a rank that is still sending: both links could be full, and both ranks blocked.
        "star": Schedule(star_all_reduce, _one, pass_on=False, sums=SumRule.IN_RANK_ORDER),
        "direct": Schedule(direct_all_reduce, _all, sums=SumRule.IN_RANK_ORDER),
        "ring": Schedule(ring_all_reduce, _all),
        # Ranks overwrite what they have just sent.
        "recursive_doubling": Schedule(doubling_all_reduce, _one, lend=False, sums=SumRule.ALIKE),
        "halving_doubling": Schedule(halving_doubling_all_reduce, power_of_two),
        "hierarchical": Schedule(hierarchical_all_reduce, hierarchical_chunks, by_node=True),
    },
    "reduce": {
        "star": Schedule(star_reduce, _one, sums=SumRule.IN_RANK_ORDER),
        "tree": Schedule(tree_reduce, _one),
    },
    "reduce_scatter": {
        "direct": Schedule(direct_reduce_scatter, _all, sums=SumRule.IN_RANK_ORDER),
        "ring": Schedule(ring_reduce_scatter, _all),
    },
    "broadcast": {
        "tree": Schedule(tree_broadcast, _one),
        "scatter_all_gather": Schedule(scatter_broadcast, _all),
    },
    "scatter": {"direct": Schedule(direct_scatter, _all)},
    "all_gather": {
        "direct": Schedule(direct_all_gather, _all),
        "bruck": Schedule(bruck_all_gather, _all),
        "ring": Schedule(ring_all_gather, _all),
    },
    "gather": {"direct": Schedule(direct_gather, _all)},
    "all_to_all": {"pairwise": Schedule(pairwise_all_to_all, _both)},
    "barrier": {
        "dissemination": Schedule(dissemination_barrier, _one, lend=False),
        "ring": Schedule(ring_barrier, _one, lend=False),
        "star": Schedule(star_barrier, _one, pass_on=False, lend=False),
    },
}

ROOTED = frozenset({"reduce", "broadcast", "scatter", "gather"})
"""Collectives whose rows depend on a root."""


def rows_of(collective: str, schedule: str, rank: int, world: int, root: int = 0, nodes: Nodes = ()) -> list[Row]:
    """Returns one rank's rows; only rooted collectives use `root`, and only schedules with `by_node` use `nodes`."""
    how = SCHEDULES[collective][schedule]
    if how.by_node:
        return how.rows(rank, world, nodes)
    return how.rows(rank, world, root) if collective in ROOTED else how.rows(rank, world)


def chunks_of(collective: str, schedule: str, world: int, nodes: Nodes = ()) -> int:
    """Returns the number of chunks in a schedule's rows."""
    how = SCHEDULES[collective][schedule]
    return how.chunks(world, nodes) if how.by_node else how.chunks(world)
