"""When a standby tries to take over, decided from what it has seen of the leader's record. Pure.

Whether it succeeds is decided by the store alone: it tries from the revision that it has seen, and is refused if the
leader has stored anything since.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.storage.etcd import FENCE_S
from paceline_server.storage.shared_keys import LeaderRecord

LOOK_S = 0.1
"""Seconds between two looks at the record."""

_SETTLED_S = 0.5
"""Seconds of an epoch after which a refused connection proves that the leader has ended. A new leader closes the port,
which was open while it stood by, and opens it again."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A standby's decision: it `tries` to take over now, or decides again at `due`; `why` is for people."""

    tries: bool
    due: float
    why: str


class Election:
    """The knowledge of one standby.

    `record` was last written at `revision`; None and 0 if there is none. `highest` is the highest epoch that was seen;
    the record may have a lower one if etcd was restored from a backup. A standby tries after `fence_s` seconds
    in which the leader has stored nothing.
    """

    def __init__(self, name: str, *, fence_s: float = FENCE_S) -> None:
        self._name = name
        self._fence_s = fence_s
        self.record: LeaderRecord | None = None
        self.revision = 0
        self.seen = False
        self.highest = 0
        self._since = self._epoch_since = 0.0
        self._refused = False
        self._reached = ""  # the leader's address, once this epoch's leader was connected to

    @property
    def leader(self) -> str:
        """The leader's address; empty if there is none, or none that is known."""
        record = self.record
        return "" if record is None or record.name == self._name else record.address

    def saw(self, now: float, record: LeaderRecord | None, revision: int) -> None:
        """Notes the record as it was read. `now` is the time at which the answer came."""
        if self.seen and (revision, record) == (self.revision, self.record):
            return
        epoch = 0 if record is None else record.epoch
        self.highest = max(self.highest, epoch)
        if not self.seen or self.record is None or self.record.epoch != epoch:
            self._epoch_since, self._reached = now, ""
        self.seen, self.record, self.revision = True, record, revision
        self._since, self._refused = now, False

    def reached(self, address: str) -> None:
        """Notes that somebody listens at an address."""
        if address == self.leader:
            self._reached = address

    def refused(self, now: float, address: str) -> None:
        """Notes that nobody listens at an address; if it is the leader's, that counts until the record changes.

        It counts only if this coordinator was connected to it in this epoch. Otherwise the leader may be well, and its
        address wrong, or behind a firewall.
        """
        if address and address == self._reached == self.leader and now - self._epoch_since >= _SETTLED_S:
            self._refused = True

    def decide(self, now: float) -> Decision:
        """Decides whether to try to take over."""
        record = self.record
        if not self.seen:
            return Decision(False, now + LOOK_S, "the state in etcd was not read yet")
        if record is None:
            return Decision(True, now, "no coordinator has led yet")
        if record.name == self._name:
            return Decision(True, now, f"the record of epoch {record.epoch} is this coordinator's own")
        if not record.address:
            return Decision(True, now, f"the leader of epoch {record.epoch} has resigned")
        if self._refused:
            return Decision(True, now, f"nobody listens at {record.address}, the leader's address")
        silent = now - self._since
        if silent >= self._fence_s:
            return Decision(True, now, f"the leader at {record.address} has stored nothing for {silent:.1f} s")
        return Decision(False, self._since + self._fence_s, f"{record.address} leads in epoch {record.epoch}")
