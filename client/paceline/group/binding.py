"""What binds a group to one generation: its links, engine, lane and mailbox. The next generation makes a new one."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from time import monotonic

from paceline.collectives.engine import Engine
from paceline.collectives.mailbox import Mailbox
from paceline.links.base import Mesh
from paceline.recorder import FlightRecorder
from paceline.work import Lane

__all__ = ["Binding"]


class Binding:
    """A group in one generation.

    Args:
        mesh: this member's links to the group's members.
        name: the group's name; "" for the whole view.
        label: what its members must agree on, for signatures.
        recorder: remembers operations.

    Attributes:
        mesh: as given.
        name: as given.
        engine: runs collectives.
        lane: keeps their order.
        stale: True once the group has gone on without it.
        parts: how many parts have been made, by name.
    """

    def __init__(self, mesh: Mesh, name: str, label: str, recorder: FlightRecorder) -> None:
        self.mesh = mesh
        self.name = name
        self.engine = Engine(mesh, partial(recorder.find, mesh.generation, name), label)
        self.lane = Lane(self.engine.abort, exclusive=mesh.size > 1)
        self.stale = False
        self.parts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._mailbox: Mailbox | None = None

    @property
    def mailbox(self) -> Mailbox:
        """Messages between the members, made when first used."""
        with self._lock:
            if self._mailbox is None:
                self._mailbox = Mailbox(self.mesh)
            return self._mailbox

    def end_lane(self, deadline: float) -> None:
        """Ends what is under way; the links are the caller's to close. Idempotent."""
        self.lane.close(deadline)
        if self._mailbox is not None:
            self._mailbox.close()

    def abandon(self) -> None:
        """The group goes on without this; its links end with its mesh."""
        self.stale = True
        self.end_lane(monotonic())
