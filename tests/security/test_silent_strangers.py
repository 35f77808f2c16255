"""Strangers at a worker's port for data who say nothing: they hold places there, and no member waits for long."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from integration.mixed_world import Place, kinds_of, mixed_world, run_all
from paceline._group import Group
from paceline._links.grpc_door import Door, DoorLimits
from paceline._links.kind import TICKET_LIFETIME
from paceline._links.tcp import TcpKind

STRANGERS = 300
"""More than have a place at one time (256): the others wait before the members who come then."""


class Crowd:
    """Strangers who say nothing, and who come again whenever they are turned away, if they are told to.

    Attributes:
        port: where they go.
        came_again: how often.
    """

    def __init__(self, port: int, *, come_again: bool) -> None:
        self.port, self.came_again = port, 0
        self._there = [self._come() for _ in range(STRANGERS)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._return)
        if come_again:
            self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        for sock in self._there:
            sock.close()

    def _come(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 5.0)

    def _return(self) -> None:
        while not self._over.is_set():
            poll = select.poll()
            for sock in self._there:
                poll.register(sock, select.POLLIN)
            ended = {fd for fd, _ in poll.poll(20.0)}
            for index, sock in enumerate(self._there):
                if sock.fileno() in ended:
                    sock.close()
                    try:
                        self._there[index] = self._come()
                    except ConnectionError:  # the worker has ended
                        return
                    self.came_again += 1


@pytest.fixture
def crowds() -> Iterator[list[Crowd]]:
    made: list[Crowd] = []
    yield made
    for crowd in made:
        crowd.close()


@pytest.mark.parametrize("come_again", [False, True], ids=["who stay", "who come again"])
def test_members_get_tcp_links_despite_silent_strangers(come_again: bool, crowds: list[Crowd]) -> None:
    """Strangers may stay for 10 s here, and a member waits for 8: so the oldest of them have to give way."""

    def besiege(door: Door) -> None:
        tcp = door.kinds.of(TcpKind).host
        assert tcp is not None
        tcp.limits = replace(tcp.limits, hello_s=TICKET_LIFETIME)
        if not crowds:
            crowds.append(Crowd(tcp.port, come_again=come_again))

    def total(group: Group) -> int:
        return int(group.all_reduce(group.empty(1, "int64") * 0 + group.rank)[0])

    places, limits = [Place(links=("tcp",))] * 3, DoorLimits(open_s=0.8 * TICKET_LIFETIME)
    with mixed_world(places, prepare=besiege, limits=limits) as world:
        assert run_all(world.groups, total) == [3, 3, 3]
        assert [set(kinds_of(mesh).values()) for mesh in world.meshes] == [{"tcp"}] * 3
        assert come_again or not crowds[0].came_again
