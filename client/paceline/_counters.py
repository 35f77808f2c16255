"""Counts steps, samples and bytes of one member, for its heartbeats and for `session.stats()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import NamedTuple

from paceline_protocol import Counters

__all__ = ["MemberCounters", "counted_since"]


class _Checkpoints(NamedTuple):
    step: int = 0
    written: int = 0
    failures: int = 0
    seconds: float = 0.0


class MemberCounters:
    """Counters of one member, over all generations. Threads that train or write a checkpoint count; any may read.

    Attributes:
        committed: steps that it has committed.
        undone: steps that it began and that were undone.
        samples: samples of its share in the committed steps.
        skipped: committed steps in which no member made an update.
        left_out: samples of its share in those.
        waited: seconds that its threads have waited in collectives.
        state_bytes: bytes of training state that it has fetched from other members.
        state_time: seconds that it has spent in fetching them.
    """

    def __init__(self) -> None:
        self.committed = self.undone = self.samples = 0
        self.skipped = self.left_out = 0
        self.waited = 0.0
        self.state_bytes, self.state_time = 0, 0.0
        self._sent: dict[str, int] = {}  # in generations that are over
        self._told = Counters()
        self._checkpoints = _Checkpoints()  # replaced as a whole, so that a reader never sees half of a checkpoint
        self._useful = 0.0
        self._since: float | None = None  # when the first step began
        self._mark: float | None = None  # when the present step began; None if none has since the last meeting
        self._applied = self._passed_over = (0, 0)  # the last step that was applied, or skipped, and its samples

    # Steps ------------------------------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Takes note that a step begins, or is tried again."""
        now = monotonic()
        self._since = now if self._since is None else self._since
        self._mark = now if self._mark is None else self._mark

    def step_applied(self, number: int, samples: int) -> None:
        """Takes note that the step has changed the state of this member.

        Args:
            number: of the step.
            samples: of this member's share.
        """
        now = monotonic()
        self._useful += now - (now if self._mark is None else self._mark)
        self._mark, self._applied = now, (number, samples)

    def step_skipped(self, number: int, samples: int) -> None:
        """Takes note that all members skip the step.

        Args:
            number: of the step.
            samples: of this member's share, which are left out.
        """
        self._mark, self._passed_over = monotonic(), (number, samples)

    def step_undone(self) -> None:
        """Takes note that the step was undone."""
        self.undone += 1
        self._mark = None

    def step_committed(self, number: int) -> None:
        """Takes note that the step counts on every member."""
        self.committed += 1
        if self._applied[0] == number:
            self.samples += self._applied[1]
        elif self._passed_over[0] == number:
            self.skipped += 1
            self.left_out += self._passed_over[1]

    def stopped(self) -> None:
        """Takes note that this member waits for the next generation."""
        self._mark = None

    @property
    def goodput(self) -> float:
        """Share of the time since the first step that went into steps which were applied, 0 to 1; 0 before that."""
        if self._since is None:
            return 0.0
        until = monotonic() if self._mark is None else self._mark
        return self._useful / (until - self._since) if until > self._since else 0.0

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def checkpoint_written(self, step: int, seconds: float) -> None:
        """Takes note that a checkpoint is complete.

        Args:
            step: of the state in it.
            seconds: from the beginning of the write until now.
        """
        before = self._checkpoints
        self._checkpoints = _Checkpoints(step, before.written + 1, before.failures, before.seconds + seconds)

    def checkpoint_failed(self) -> None:
        """Takes note that a checkpoint could not be written."""
        self._checkpoints = self._checkpoints._replace(failures=self._checkpoints.failures + 1)

    # Bytes ------------------------------------------------------------------------------------------------------------

    def state_received(self, size: int) -> None:
        """Takes note of bytes of training state that have come from another member."""
        self.state_bytes += size

    @contextmanager
    def fetching_state(self) -> Iterator[None]:
        """Counts the time of its block, in which this member fetches training state."""
        began = monotonic()
        try:
            yield
        finally:
            self.state_time += monotonic() - began

    def generation_ended(self, sent: Mapping[str, int]) -> None:
        """Adds what was sent in a generation that is over, in bytes by kind of link."""
        self._sent = _sum(self._sent, sent)

    def read(self, sent: Mapping[str, int]) -> Counters:
        """Returns all counters; none is below what an earlier call returned.

        Args:
            sent: bytes by kind of link in the present generation.
        """
        # Another thread may be moving to the next generation, or counting, just now.
        told = self._told
        checkpoints = self._checkpoints
        total = _sum(dict.fromkeys(told.sent_bytes, 0) | self._sent, sent)
        self._told = Counters(
            committed=self.committed,
            undone=self.undone,
            samples=self.samples,
            sent_bytes={kind: max(size, told.sent_bytes.get(kind, 0)) for kind, size in total.items()},
            in_collectives=max(self.waited, told.in_collectives),
            checkpoint_step=checkpoints.step,
            checkpoints=checkpoints.written,
            checkpoint_failures=checkpoints.failures,
            checkpoint_time=checkpoints.seconds,
            state_bytes=self.state_bytes,
            state_time=self.state_time,
        )
        return self._told


def counted_since(start: Counters, now: Counters) -> Counters:
    """Returns what was counted between two calls of `MemberCounters.read`."""
    return Counters(
        committed=now.committed - start.committed,
        undone=now.undone - start.undone,
        samples=now.samples - start.samples,
        sent_bytes={kind: size - start.sent_bytes.get(kind, 0) for kind, size in now.sent_bytes.items()},
        in_collectives=now.in_collectives - start.in_collectives,
        checkpoint_step=now.checkpoint_step if now.checkpoints > start.checkpoints else 0,
        checkpoints=now.checkpoints - start.checkpoints,
        checkpoint_failures=now.checkpoint_failures - start.checkpoint_failures,
        checkpoint_time=now.checkpoint_time - start.checkpoint_time,
        state_bytes=now.state_bytes - start.state_bytes,
        state_time=now.state_time - start.state_time,
    )


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}
