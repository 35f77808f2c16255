"""A mesh that loses, changes or refuses frames on purpose, for tests.

    def lose_third(way, peer, frame):
        return None if way == "send" and frame.part == 2 else frame

    group = Group(FaultyMesh(mesh, lose_third), config)

It works over every kind of link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline._links.base import Link, Mesh, Purpose
from paceline._links.frame import Frame

Tamper: TypeAlias = Callable[[str, int, Frame], Frame | None]
"""Gets "send" or "recv", the peer's rank and the frame. Returns the frame that goes on, or None to lose it. The link
raises what it raises."""


class FaultyMesh(Mesh):
    """Passes each frame through `tamper`, and everything to another mesh.

    This member sends frames, never marks, so that `tamper` sees everything that it sends. Marks from others pass
    unchanged.

    Args:
        mesh: the mesh that does the work.
        tamper: changes, loses or refuses frames.

    Attributes:
        inner: the mesh that does the work.
    """

    def __init__(self, mesh: Mesh, tamper: Tamper) -> None:
        self.generation = mesh.generation
        self.rank = mesh.rank
        self.peers = mesh.peers
        self.fault = mesh.fault
        self.version = mesh.version
        self.inner = mesh
        self._tamper = tamper

    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        """Returns the link to a rank, with faults (`Mesh.link`)."""
        return _FaultyLink(self.inner.link(peer, purpose, group), self._tamper)

    def linked(self, purpose: Purpose, group: str = "") -> Sequence[int]:
        """Returns the ranks with a link (`Mesh.linked`)."""
        return self.inner.linked(purpose, group)

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an array of the inner mesh (`Mesh.empty`)."""
        return self.inner.empty(shape, dtype)

    @property
    def neighbours(self) -> int:
        """The neighbours of the inner mesh (`Mesh.neighbours`)."""
        return self.inner.neighbours

    @property
    def encrypted(self) -> bool:
        """As in the inner mesh (`Mesh.encrypted`)."""
        return self.inner.encrypted

    @property
    def bytes_sent(self) -> int:
        """Bytes that the inner mesh has sent (`Mesh.bytes_sent`)."""
        return self.inner.bytes_sent

    @property
    def sent_bytes(self) -> Mapping[str, int]:
        """Bytes that the inner mesh has sent (`Mesh.sent_bytes`)."""
        return self.inner.sent_bytes

    def close(self, deadline: float) -> None:
        """Closes every link (`Mesh.close`)."""
        self.inner.close(deadline)

    def close_group(self, group: str, deadline: float) -> None:
        """Closes the links of a group (`Mesh.close_group`)."""
        self.inner.close_group(group, deadline)


class _FaultyLink(Link):
    def __init__(self, link: Link, tamper: Tamper) -> None:
        self.peer = link.peer
        self.kind = link.kind
        self._link = link
        self._tamper = tamper

    def send(self, frame: Frame, deadline: float) -> None:
        passed = self._tamper("send", self.peer.rank, frame)
        if passed is not None:
            self._link.send(passed, deadline)

    def lend(self, frame: Frame, deadline: float) -> None:
        passed = self._tamper("send", self.peer.rank, frame)
        if passed is not None:
            self._link.lend(passed, deadline)

    def await_release(self, deadline: float) -> None:
        self._link.await_release(deadline)

    def recall(self) -> None:
        self._link.recall()

    def release(self) -> None:
        self._link.release()

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        while True:
            passed = self._tamper("recv", self.peer.rank, self._link.recv(deadline, into))
            if passed is not None:
                return passed
            self._link.release()

    def await_mark(self, deadline: float) -> Frame | int:
        while True:
            found = self._link.await_mark(deadline)
            if isinstance(found, int):
                return found
            passed = self._tamper("recv", self.peer.rank, found)
            if passed is not None:
                return passed
            self._link.release()

    def on_readable(self, notify: Callable[[], None]) -> None:
        self._link.on_readable(notify)

    def close(self, deadline: float) -> None:
        self._link.close(deadline)
