"""The schedule for several nodes with several ranks each: what crosses the network crosses it once for each node.

Letters: r rank, W world size, n elements, H number of nodes, h node, L fewest ranks of any node, l place in a node.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.collectives.rows import Action, Nodes, Row

__all__ = ["hierarchical_all_reduce", "hierarchical_chunks"]


def hierarchical_chunks(world: int, nodes: Nodes = ()) -> int:
    """L times H: a part of the array for each of the first L ranks of a node, cut into H chunks."""
    by_node = _by_node(world, nodes)
    return len(by_node) * min(map(len, by_node))


def hierarchical_all_reduce(rank: int, world: int, nodes: Nodes = ()) -> list[Row]:
    """Reduce-scatter within each node, L all-reduce rings across the nodes side by side, all-gather within each node.

    The first L ranks of a node own a part each: rank l sums part l of all ranks of its node; the H owners of part l
    make a ring; then each gives its part to its node. 2(H-1)/H of the array leaves each node, whatever L is. Ranks
    beyond the first L hand in their array and get the result. The order of a sum is that of `ring_all_reduce` over the
    nodes' sums.

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
    """Step 0: every rank of a node gives each owner its part."""
    for s in range(1, len(local)):
        at = (place + s) % len(local)
        if at < owners:
            yield Row(0, send_to=local[at], send_chunk=at * span, span=span)
        if place < owners:
            action = Action.FINALIZE if final and s == len(local) - 1 else Action.REDUCE
            source = local[(place - s) % len(local)]
            yield Row(0, recv_from=source, recv_chunk=place * span, action=action, span=span)


def _by_node(world: int, nodes: Nodes) -> list[list[int]]:
    """The ranks of each node; all are of one where nothing is known."""
    ranks: dict[int, list[int]] = {}
    for rank in range(world):
        ranks.setdefault(nodes[rank] if nodes else 0, []).append(rank)
    return list(ranks.values())
