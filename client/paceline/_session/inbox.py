"""The inbox of a member's training thread: what the coordinator says about its line, and what the session adds to that.

The messages arrive on the event loop and wait here until the training thread reads them; nothing is decided here. The
coordinator's have the types of `paceline_protocol.messages`. Requests to stop (`summoned`, `draining`) are plain values
that the training thread reads when it begins a step.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from paceline._links.base import Mesh, Peer
from paceline_protocol.messages import (
    CatchUp,
    Dismissed,
    Finished,
    Mismatch,
    Running,
    Spare,
    StateLost,
    ViewFormed,
    Waiting,
)


@dataclass(frozen=True, slots=True)
class ViewLinked:
    """Says that a view has formed with this member, and that its links are there.

    `mesh` is None if the member list could no longer be fetched. `member_id` is this worker's in the view; it may have
    a new one since.
    """

    view: ViewFormed
    mesh: Mesh | None
    member_id: str


@dataclass(frozen=True, slots=True)
class LineMembers:
    """Names the members of the line of the last `Running` that have not ended, once their list has been fetched."""

    members: Sequence[Peer]


@dataclass(frozen=True, slots=True)
class ReachResult:
    """The result of testing whether this worker and a line's members can connect, with a text for each that cannot."""

    members: Sequence[Peer]
    troubles: list[str]


@dataclass(frozen=True, slots=True)
class SessionReplaced:
    """Says that this member's session had ended unnoticed, and that it has a new one, as a newcomer."""


@dataclass(frozen=True, slots=True)
class SessionOver:
    """Says that the session is over for good, or that this member cannot go on."""

    error: BaseException


News: TypeAlias = Running | LineMembers | ReachResult | Waiting
"""Messages that only inform, and ask this member for nothing."""

InboxMessage: TypeAlias = (
    ViewLinked | CatchUp | Mismatch | Dismissed | Spare | StateLost | Finished | SessionReplaced | SessionOver | News
)


class MemberInbox:
    """The messages of one session.

    `summoned` is the generation in which this member is to ask for a meeting, 0 for none. `draining` says why this
    member should leave; empty if it should not. `connected` is False while the coordinator cannot be reached. `done` is
    the job's last step once it is done.
    """

    def __init__(self) -> None:
        self.summoned = 0
        self.done: int | None = None
        self.draining = ""
        self.connected = True
        self._messages: queue.SimpleQueue[InboxMessage] = queue.SimpleQueue()
        self._put = self._got = 0  # counts of messages that ask for something; each is written by one thread

    def put(self, message: InboxMessage) -> None:
        """Adds a message; on the loop, or from any thread if it says that the session is over."""
        self._put += not isinstance(message, News)
        self._messages.put(message)

    @property
    def asks(self) -> bool:
        """True if there is an unread message that is not merely news."""
        return self._put != self._got

    def get(self, timeout: float) -> InboxMessage | None:
        """Returns the next message; None if none came within `timeout` seconds."""
        try:
            message = self._messages.get(timeout=timeout)
        except queue.Empty:
            return None
        self._got += not isinstance(message, News)
        return message
