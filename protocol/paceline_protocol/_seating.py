"""Gives out the seats of a line's next generation: little of a sharded state moves, and members of a host share a node.

A node is a group of members that hold one copy of the state between them. If all are on one host, the death of that
host leaves the other copies whole, and what members of the node send each other stays on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from paceline_protocol._job_state import Session
from paceline_protocol._values import Share, Tag

_Node = list[Session | None]
"""The seats of one node: the member at index p holds part p."""


def holds(session: Session, base: Tag, share: Share) -> bool:
    """True if the member has this share of that state."""
    met = session.met
    return met is not None and met.tag == base and share in met.shares


def by_host(sessions: Iterable[Session]) -> list[Session]:
    """Sorts members by host: hosts in the order in which they first occur, and members of a host as they are."""
    return [session for there in _hosts(sessions).values() for session in there]


def seated(
    staying: Sequence[Session], incoming: Sequence[Session], base: Tag, node_size: int, most: int
) -> list[Session]:
    """Returns the members that get a seat, in the order of their ranks: `most` at most, a multiple of `node_size`.

    If each member holds the whole state, that is the order in which they are given. Otherwise a member that was
    promised a seat keeps it, for it may be taking the share of that seat. A member that holds a share gets a seat for
    it, in the node of its host if possible. The other members get the seats that are left, `incoming` ones last: first
    in nodes that have members of their host, then, if there are enough of them on a host, in a node of their own.
    """
    world = min(len(staying) + len(incoming), most)
    world -= world % max(1, node_size)
    if node_size == 1 or not world:
        return [*staying, *incoming][:world]
    size = node_size or world
    table = _Table(world // size, size)
    left: list[list[Session]] = []
    for group, room in ((staying, world), (incoming, max(0, world - len(staying)))):
        unpromised = _keep_promises(table, group, base, room)
        left.append(_seat_holders(table, unpromised, base, room - len(group) + len(unpromised)))
    _seat_others(table, _chosen(table, *left))
    return [session for node in table.nodes for session in node if session is not None]


class _Table:
    """The seats of all nodes, which are in the order of their ranks.

    `held` has the pairs of a host and a part that one of its members has a seat for.
    """

    def __init__(self, nodes: int, size: int) -> None:
        self.nodes: list[_Node] = [[None] * size for _ in range(nodes)]
        self.size = size
        self.held: set[tuple[str, int]] = set()
        self.free = nodes * size
        self._full = [0] * size
        """For each part, the number of nodes, from the first, whose seat for it is taken."""

    def sit(self, node: _Node, part: int, session: Session) -> None:
        """Gives a member a seat."""
        node[part] = session
        self.held.add((_host(session), part))
        self.free -= 1

    def first(self, parts: Collection[int]) -> _Node | None:
        """The first node whose seats for these parts are all free."""
        for part in parts:
            while self._full[part] < len(self.nodes) and self.nodes[self._full[part]][part] is not None:
                self._full[part] += 1
        later = range(max(self._full[part] for part in parts), len(self.nodes))
        return next((self.nodes[n] for n in later if all(self.nodes[n][part] is None for part in parts)), None)

    def begun(self) -> list[tuple[_Node, list[str]]]:
        """The nodes that are filled in part, each with the hosts of its members."""
        there = [(node, list(_hosts(session for session in node if session is not None))) for node in self.nodes]
        return [(node, hosts) for node, hosts in there if hosts and None in node]


def _keep_promises(table: _Table, group: Sequence[Session], base: Tag, room: int) -> list[Session]:
    """Gives members the seats that they were promised, at most `room` of them; returns those without one."""
    left: list[Session] = []
    for session in group:
        base_, world, rank = session.promised or (base, 0, 0)
        node, part = divmod(rank, table.size)
        if room and (base_, world) == (base, len(table.nodes) * table.size) and table.nodes[node][part] is None:
            table.sit(table.nodes[node], part, session)
            room -= 1
        else:
            left.append(session)
    return left


def _seat_holders(table: _Table, group: Sequence[Session], base: Tag, room: int) -> list[Session]:
    """Gives up to `room` members that hold a part a seat for it, and returns the members that got none."""
    teams: dict[tuple[str, int], dict[int, Session]] = {}
    rows: Counter[tuple[str, int]] = Counter()
    left = dict.fromkeys(group)
    for session in group:
        for part in _parts(session, base, table.size)[:1]:  # what it trains on
            host = _host(session)
            teams.setdefault((host, rows[host, part]), {})[part] = session
            rows[host, part] += 1
    begun = table.begun()
    homes = {host for _, hosts in begun for host in hosts}
    for (host, _), team in sorted(teams.items(), key=lambda item: (item[0][0] in homes, len(item[1])), reverse=True):
        if len(team) > room:
            continue
        at_home = (node for node, hosts in begun if host in hosts and all(node[part] is None for part in team))
        if (node := next(at_home, None) or table.first(team)) is None:
            continue
        for part, session in team.items():
            table.sit(node, part, session)
            del left[session]
            room -= 1
    for session in list(left):
        for part in _parts(session, base, table.size) if room else ():
            if (node := table.first((part,))) is not None:
                table.sit(node, part, session)
                del left[session]
                room -= 1
                break
    return list(left)


def _chosen(table: _Table, members: Sequence[Session], newcomers: Sequence[Session]) -> list[Session]:
    """Chooses members for the free seats: former members first, then those that can sit with others of their host."""
    homes = {host for _, hosts in table.begun() for host in hosts}
    many = {s for there in _hosts([*members, *newcomers]).values() for s in there[: _whole(there, table.size)]}

    def rank(session: Session) -> tuple[bool, bool]:
        return _host(session) not in homes, session not in many

    return [*sorted(members, key=rank), *sorted(newcomers, key=rank)][: table.free]


def _seat_others(table: _Table, chosen: Iterable[Session]) -> None:
    """Seats members without a share: with others of their host, in nodes that a host fills, and then in any seat."""
    left = dict.fromkeys(chosen)
    hosts = _hosts(left)
    for node, homes in table.begun():
        for session in [s for host in homes if host in hosts for s in hosts[host]]:
            if session in left and None in node:
                table.sit(node, node.index(None), session)
                del left[session]
    for there in _hosts(left).values():
        for start in range(0, _whole(there, table.size), table.size):
            if (empty := table.first(range(table.size))) is not None:
                for part, session in enumerate(there[start : start + table.size]):
                    table.sit(empty, part, session)
                    del left[session]
    queue = by_host(left)  # side by side they have different parts
    for node, part in [(node, part) for node in table.nodes for part in range(table.size) if node[part] is None]:
        elsewhere = (session for session in queue if (_host(session), part) not in table.held)
        session = next(elsewhere, None) or queue[0]
        table.sit(node, part, session)
        queue.remove(session)


def _parts(session: Session, base: Tag, parts: int) -> list[int]:
    """The parts that a member has of a state that is cut into this many, the one that it trains on first."""
    met = session.met
    return [share.part for share in met.shares if share.parts == parts] if met is not None and met.tag == base else []


def _whole(there: Sequence[Session], size: int) -> int:
    """The number of these members that fill whole nodes."""
    return len(there) - len(there) % size


def _hosts(sessions: Iterable[Session]) -> dict[str, list[Session]]:
    hosts: dict[str, list[Session]] = {}
    for session in sessions:
        hosts.setdefault(_host(session), []).append(session)
    return hosts


def _host(session: Session) -> str:
    """The machine that a member runs on, as far as is known: the node on which it shares memory, else the host."""
    return session.process.node or session.process.host
