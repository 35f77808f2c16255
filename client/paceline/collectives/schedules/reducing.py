"""Schedules that combine the arrays of all ranks.

The order in which an element is summed is written down for each, for it decides the bits. "Rank order" is
((x_0 + x_1) + x_2) + ...: the same for every size, world and schedule that has it.

Letters: r rank, W world size, n elements, c chunk, s step, P the greatest power of two up to W.
"""

from __future__ import annotations

from paceline.collectives.rows import Action, Row, ring_neighbours
from paceline.collectives.schedules.spreading import tree_children, tree_parent

__all__ = [
    "direct_all_reduce",
    "direct_reduce_scatter",
    "doubling_all_reduce",
    "halving_doubling_all_reduce",
    "power_of_two",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "star_all_reduce",
    "star_reduce",
    "tree_reduce",
]


def star_all_reduce(rank: int, world: int) -> list[Row]:
    """One chunk. All send to rank 0, which sums in rank order and sends the total back: two steps in latency."""
    rows = star_reduce(rank, world, 0)
    if rank != 0:
        return [*rows, Row(1, recv_from=0, recv_chunk=0)]
    return rows + [Row(1, send_to=peer, send_chunk=0) for peer in range(1, world)]


def direct_all_reduce(rank: int, world: int) -> list[Row]:
    """W chunks. Rank c takes in chunk c from all, sums in rank order, and sends the total to all.

    Two steps in latency and 2(W-1)/W of the array sent by each rank, as the ring, but over all W-1 links at once.
    """
    rows = direct_reduce_scatter(rank, world)
    for s in range(1, world):
        to, source = (rank + s) % world, (rank - s) % world
        rows.append(Row(1, to, rank, source, source))
    return rows


def ring_all_reduce(rank: int, world: int) -> list[Row]:
    """W chunks. Reduce-scatter around the ring, then all-gather: 2(W-1) steps, 2(W-1)/W of the array sent by each.

    Chunk c is summed in the order ((x_c + x_(c+1)) + ...) + x_(c+W-1), indices modulo W; the last of them, rank
    (c-1) mod W, owns the total and the others copy it, so that all ranks hold the same bits.

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

    Every rank sums by itself. They sum the same pairs, and a + b has the bits of b + a, so they get the same bits.
    Of the first 2(W-P) ranks the even ones only hand in their array and get the result.

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
    """P chunks. Recursive halving, then recursive doubling: 2 log2 P steps and 2(P-1)/P of the array sent by each rank.

    In the first half ranks r and r xor P/2^(s+1) split what they both hold: each hands over one half and sums the
    other. Core rank c ends with the total of chunk c, which all others copy. Ranks beyond P hand in their array first,
    whole, as in `doubling_all_reduce`.

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
    """One chunk. Up the binary tree of `tree_broadcast`; a rank sums its own, its left and its right subtree."""
    children, parent = tree_children(rank, world, root), tree_parent(rank, world, root)
    rows = [Row(0, recv_from=child, recv_chunk=0, action=Action.REDUCE) for child in children]
    if parent is not None:
        return [*rows, Row(1, send_to=parent, send_chunk=0)]
    return rows[:-1] + [row._replace(action=Action.FINALIZE) for row in rows[-1:]]


def direct_reduce_scatter(rank: int, world: int) -> list[Row]:
    """W chunks. Every rank sends chunk c to rank c, which sums in rank order; one step in latency."""
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
    """The greatest power of two that is not above the world size."""
    return 1 << (world.bit_length() - 1)


def _fold_in(rank: int, world: int, chunks: int = 1) -> tuple[int | None, list[Row], int, int]:
    """Makes a power of two of the world.

    Returns:
        (rank in the core, None for one outside; rows so far, all of them for one outside; next step; last step).
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
    """The rank of a core rank."""
    extra = world - power_of_two(world)
    return 2 * core + 1 if core < extra else core + extra
