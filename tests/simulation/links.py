"""Simulated links, so that the real group with its engine and its thread runs on the simulated clock.

`group` has the imitation that most schedules use, because it takes a tenth of the time. Here a collective is what it
is in real life: frames of the real programs, each with a delay of its own, in order on each link, held while the
network is cut, and those that are under way arrive although their sender has died.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from simulation import group
from simulation.threads import Waiters

import paceline._group
from paceline._group.group_core import Piggyback
from paceline._group.wrapper_calls import WrapperCore
from paceline._links import base
from paceline._links.base import Link, LinkEnded, LinkTimeout, Peer, Purpose
from paceline._links.frame import Frame
from paceline._links.nowhere import NoMesh

if TYPE_CHECKING:
    from simulation.process import Process

__all__ = ["LinkedGroup", "LinkedMesh"]

_AGAIN_S = 0.05
"""Seconds after which a frame that did not get through is sent again."""

_PATIENCE_S = 60.0
"""Seconds after which a frame is given up whose receiver never makes its links."""


class SimulatedLink(Link):
    """One member's end of a link."""

    kind = "simulated"

    def __init__(self, mesh: LinkedMesh, peer: Peer, purpose: Purpose, name: str) -> None:
        self.peer = peer
        self.sent_bytes = 0
        self._mesh = mesh
        self._clock = mesh.process.world.clock
        self._address = (mesh.rank, purpose, name)
        self._last = 0.0
        self._held: deque[tuple[Frame | None, float]] = deque()
        self._arrived: deque[Frame] = deque()
        self._left = False
        self._waiters = Waiters()
        self._notify: Callable[[], None] = _nothing
        mesh.fault.on_failure(self._wake)

    def send(self, frame: Frame, deadline: float) -> None:
        """See `Link.send`; there is always room."""
        self._mesh.fault.check()
        if self._mesh.ended:
            raise LinkEnded("the link is closed", orderly=True)
        self.sent_bytes += len(frame.payload)
        self._set_out(replace(frame, payload=memoryview(bytes(frame.payload))))

    def recv(self, deadline: float, into: memoryview | None = None) -> Frame:
        """See `Link.recv`."""
        while not (self._arrived or self._left or self._mesh.fault.failed):
            left = deadline - self._clock.now
            if left <= 0 or not (self._waiters.wait(left) or self._arrived):
                raise LinkTimeout("nothing came")
        self._mesh.fault.check()
        if not self._arrived:
            raise LinkEnded("the other side has left", orderly=True)
        return self._arrived.popleft()

    def on_readable(self, notify: Callable[[], None]) -> None:
        """See `Link.on_readable`."""
        self._notify = notify
        notify()

    def close(self, deadline: float) -> None:
        """See `Link.close`: says behind the last frame that nothing follows."""
        self._set_out(None)

    def take_in(self, frame: Frame | None) -> None:
        """A frame has come, or None for the end of all."""
        if frame is None:
            self._left = True
        else:
            self._arrived.append(frame)
        self._wake()

    def _wake(self) -> None:
        self._waiters.wake()
        self._notify()

    def _set_out(self, frame: Frame | None) -> None:
        self._last = max(self._last, self._clock.now + self._mesh.process.world.latency())
        self._clock.at(self._last, self._arrive, frame)

    def _arrive(self, frame: Frame | None) -> None:
        if self._held or not self._deliver(frame):
            self._held.append((frame, self._clock.now + _PATIENCE_S))
            if len(self._held) == 1:
                self._clock.after(_AGAIN_S, self._try_again)

    def _try_again(self) -> None:
        while self._held and (self._clock.now > self._held[0][1] or self._deliver(self._held[0][0])):
            self._held.popleft()
        if self._held:
            self._clock.after(_AGAIN_S, self._try_again)

    def _deliver(self, frame: Frame | None) -> bool:
        """Hands a frame over, or drops it if nobody will ever take it; False if it has to wait."""
        mine = self._mesh
        process, there = mine._there(self.peer)
        if not process.alive or mine.fault.failed or (there is not None and there.ended):
            return True
        if there is None or not mine.process.world.network.gets_through(mine.process.name, process.name):
            return False
        assert isinstance(there, LinkedMesh)
        process.hear(there.take_in, *self._address, frame)
        return True


class LinkedMesh(group.Mesh, base.Mesh):
    """One member's links in one generation (`GrpcMesh`), with what goes over them."""

    size = 0
    bytes_sent = 0

    def __init__(self, *of: Any) -> None:
        self._links: dict[tuple[int, Purpose, str], SimulatedLink] = {}
        super().__init__(*of)
        patience = self.process.world.settings.failure_timeout
        self.process.later(patience, self._watch, patience)

    def link(self, peer: int, purpose: Purpose, group: str = "") -> SimulatedLink:
        """See `Mesh.link`."""
        self.fault.check()
        return self._link(peer, purpose, group)

    def linked(self, purpose: Purpose, group: str = "") -> list[int]:
        """See `Mesh.linked`."""
        return sorted(peer for peer, *of in self._links if of == [purpose, group])

    def close_group(self, group: str, deadline: float) -> None:
        """See `Mesh.close_group`."""

    def take_in(self, source: int, purpose: Purpose, name: str, frame: Frame | None) -> None:
        """A frame has come from a rank."""
        if frame is None and not (self._closed or self._retired or self.fault.failed):
            self.left.add(source)
        self._link(source, purpose, name).take_in(frame)

    def link_ended(self, rank: int, *, orderly: bool = False) -> None:
        """See `group.Mesh.link_ended`; the end of one that leaves in order comes behind its frames."""
        if not orderly:
            super().link_ended(rank)

    def _link(self, peer: int, purpose: Purpose, name: str) -> SimulatedLink:
        key = (peer, purpose, name)
        if key not in self._links:
            self._links[key] = SimulatedLink(self, self.peers[peer], purpose, name)
        return self._links[key]

    def _end(self, *, orderly: bool) -> None:
        if orderly and not self.ended:
            for peer in self.peers:
                if peer.rank != self.rank:
                    self._link(peer.rank, Purpose.COLLECTIVE, "").close(0.0)
        super()._end(orderly=orderly)

    def _watch(self, patience: float) -> None:
        """Looks whether a link is dead, once it has waited for long."""
        if self.ended or self.fault.failed:
            return
        process = self.process
        if process.group._core.mesh is self:
            progress = process.group._core.progress()
            if progress.inside and process.world.clock.now - progress.since >= patience:
                self.poll()
        process.later(0.5, self._watch, patience)


class LinkedGroup(paceline._group.Group):
    """The real group, whose words the checks hear."""

    _core: LinkedCore

    def __init__(self, mesh: Any, config: Any) -> None:
        self.process: Process = mesh._kinds if isinstance(mesh, NoMesh) else mesh.process
        self._core = LinkedCore(mesh, config)
        self._core.group = self
        self.process.group = self

    @property
    def is_busy(self) -> bool:
        """True while a collective runs or waits."""
        lane = self._core.bound.lane
        return lane._busy is not None or bool(lane._queue)

    def all_reduce(self, x: Any, *, label: str = "", async_op: Any = False, **how: Any) -> Any:
        """See `Group.all_reduce`."""
        if label.startswith("step-"):
            self._sets_out(label)
        result = super().all_reduce(x, label=label, async_op=async_op, **how)
        if label.startswith("closing-"):
            self.process.world.checks.closed(self.process)
        if label.startswith("step-"):
            mesh = self._core.bound.mesh
            if async_op:
                result.on_done(lambda: None if result.exception() else self._completed(mesh, label))
            else:
                self._completed(mesh, label)
        return result

    def _sets_out(self, label: str) -> None:
        mesh: Any = self._core.bound.mesh
        states = self.process.world.words.setdefault((mesh.key, label), {})
        self.process.world.checks.contributed(states, mesh, int(label[5:]))
        states[mesh.member_id] = self.process.bits

    def _completed(self, mesh: Any, label: str) -> None:
        self.process.world.checks.completed(self.process.world.words[mesh.key, label], mesh)


class LinkedCore(WrapperCore):
    """The inside of a `LinkedGroup`."""

    group: LinkedGroup

    def take_piggyback(self) -> Piggyback | None:
        """See `GroupCore.take_piggyback`."""
        taken = super().take_piggyback()
        if taken is None:
            return None
        self.group._sets_out(taken._label)  # type: ignore[attr-defined]
        return _Carried(self.group, self.bound.mesh, taken)

    def issue(self, make: Any, timeout: float | None, async_op: bool) -> Any:
        """See `GroupCore.issue`."""
        self.group.process.world.moment("round", self.group.process)
        return super().issue(make, timeout, async_op)


class _Carried:
    """A step's word in a bucket of gradients."""

    def __init__(self, group: LinkedGroup, mesh: Any, word: Any) -> None:
        self.values = word.values
        self._group, self._mesh, self._word = group, mesh, word

    def arrive(self, sums: NDArray[Any]) -> None:
        self._group._completed(self._mesh, self._word._label)
        self._word.arrive(sums)


def _nothing() -> None:
    """Nobody wants to know."""
