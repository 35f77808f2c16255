"""A mesh whose frames can be lost, changed or refused on purpose: declared faults, for tests.

    def lose_third(way, peer, frame):
        return None if way == "send" and frame.part == 2 else frame

    group = Group(FaultyMesh(mesh, lose_third), config)

It serves over every kind of link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline._links.base import Link, Mesh, Purpose
from paceline._links.frame import Frame

__all__ = ["FaultyMesh", "Tamper"]

Tamper: TypeAlias = Callable[[str, int, Frame], Frame | None]
"""Given "send" or "recv", the peer's rank and the frame: returns the frame that goes on, or None to lose it; whatever
it raises, the link raises."""


class FaultyMesh(Mesh):
    """Passes everything on to another mesh, each frame through `tamper`.

    What this member tells are frames, never marks, so that `tamper` sees all of it; marks of others are no frames, and
    pass.

    Args:
        mesh: the mesh that does the work.
        tamper: what befalls frames.

    Attributes:
        inner: the mesh that does the work.
    """

    def __init__(self, mesh: Mesh, tamper: Tamper) -> None:
        self.generation = mesh.generation
        self.rank = mesh.rank
        self.peers = mesh.peers
        self.fault = mesh.fault
        self.inner = mesh
        self._tamper = tamper

    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        """The link to a rank, with faults (`Mesh.link`)."""
        return _FaultyLink(self.inner.link(peer, purpose, group), self._tamper)

    def linked(self, purpose: Purpose, group: str = "") -> Sequence[int]:
        """Ranks with a link (`Mesh.linked`)."""
        return self.inner.linked(purpose, group)

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of the mesh that does the work (`Mesh.empty`)."""
        return self.inner.empty(shape, dtype)

    @property
    def neighbours(self) -> int:
        """Those of the mesh that does the work (`Mesh.neighbours`)."""
        return self.inner.neighbours

    @property
    def bytes_sent(self) -> int:
        """What the mesh that does the work has sent (`Mesh.bytes_sent`)."""
        return self.inner.bytes_sent

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
