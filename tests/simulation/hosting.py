"""Where members of a spread state get seats that nobody has a claim to: those of one host in one node."""

from __future__ import annotations

from collections import Counter

from simulation.broken import Broken

from paceline_protocol import View, share_of
from paceline_protocol.coordinator import JobState
from paceline_protocol.messages import CatchUp

__all__ = ["Hosting"]


class Hosting:
    """Looks at views whose members had nothing of what they were told to take, and were told once.

    Args:
        node_size: so many members hold one copy of the state between them.
    """

    def __init__(self, node_size: int) -> None:
        self._node_size = node_size
        self._told: dict[int, dict[str, set[float]]] = {}
        """When members were told which share to take, by the generation that they meet after."""
        self._had: set[str] = set()
        """Members that had a share of that size already."""

    def ordered(self, now: float, state: JobState, member_id: str, order: CatchUp) -> None:
        """A member is told to take something."""
        assert state.view is not None
        met = state.sessions[member_id].met
        assert met is not None
        if order.share is not None:
            told = self._told.setdefault(state.view.generation, {})
            told.setdefault(member_id, set()).add(now)
            if any(share.parts == order.share.parts for share in met.shares):
                self._had.add(member_id)

    def forming(self, before: View, view: View) -> None:
        """A view forms, after another one."""
        told, ids = self._told.get(before.generation, {}), {seat.member_id for seat in view.seats}
        times = set().union(*told.values())
        if self._node_size < 2 or told.keys() != ids or len(times) != 1 or ids & self._had:
            return
        world, size = len(view.seats), self._node_size
        hosts = [seat.process.node or seat.process.host for seat in view.seats]
        nodes = [hosts[start : start + size] for start in range(0, world, size)]
        could = sum(count // size for count in Counter(hosts).values())
        if sum(len(set(node)) == 1 for node in nodes) < could:
            raise Broken(f"hosts: members of one host could fill {could} of the nodes {nodes}")
        for host in dict.fromkeys(hosts):
            left = [share_of(rank, world, size) for rank, there in enumerate(hosts) if there != host]
            if len(left) >= size and len(set(left)) < size:
                raise Broken(f"hosts: the death of {host} takes a part of the state along: {nodes}")
