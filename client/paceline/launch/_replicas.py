"""Decides about workers that are the ranks of replicas, which live and end as a whole. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from paceline.launch._supervision import Exit, Supervision, Terms

MATES_S = 0.5
"""Seconds between the failure of a rank and SIGKILL for its mates: they say their own errors, or end by themselves.
They get no SIGTERM, on which they would leave in good order, and wait for the rank that has failed."""


class ReplicaSupervision(Supervision):
    """A supervision whose slots are replicas: it counts, restarts and gives up replicas, each as a whole.

    The caller goes on to count processes: rank p of replica r has slot r * size + p in all calls. If a rank ends with a
    failure, or with 0 before the last step, its mates are killed `MATES_S` later (`mates_to_kill`). When all ranks have
    ended, the replica has, in the way of its first rank that failed by itself; the ends of its mates are no failures of
    their own. It has ended with 0 if all of them have.

    While workers leave because the launcher was told to end, nobody is killed for a mate, and each process counts.

    Args:
        grace: seconds, as for `Supervision`.
        terms: with `workers`, `minimum` and `restarts` in replicas.
        size: ranks of a replica.
    """

    _members = "replicas"

    def __init__(self, grace: float, terms: Terms, size: int) -> None:
        super().__init__(grace, terms)
        self._size = size
        self._gone: dict[int, int] = {}  # by replica: how many of its ranks have ended
        self._failures: dict[int, list[Exit]] = {}  # by replica: of ranks that were not killed or told to end
        self._kill_mates_at: dict[int, float] = {}  # by replica: when to kill the ranks that are left
        self._killed: set[int] = set()  # replicas whose ranks have been killed for one that had failed

    @property
    def deadline(self) -> float | None:
        """The time at which `due`, `restarts_due` or `mates_to_kill` will next return something; None for never."""
        own = super().deadline
        return min([*self._kill_mates_at.values(), *([] if own is None else [own])], default=None)

    def restartable(self, running: Collection[int]) -> int:
        """Returns how many replicas may be restarted, now or later."""
        return super().restartable({self._unit(slot) for slot in running})

    def began(self, slot: int, now: float) -> None:
        """Records that a rank was started."""
        super().began(self._unit(slot), now)

    def ended(self, end: Exit, now: float) -> str:
        """Decides what to do about a rank that has ended; the sentence comes with the last rank of its replica."""
        replica = self._unit(end.slot)
        whole = self._all_gone(replica)
        leaving = self.interrupted or self.stopping
        if leaving and replica not in self._failures:
            return super().ended(end, now)
        if (end.returncode or end.unfinished) and replica not in self._killed:
            self._failures.setdefault(replica, []).append(end)
            self._kill_mates_at.setdefault(replica, now + MATES_S)
        if not whole:
            return ""
        failures = self._failures.pop(replica, [])
        self._kill_mates_at.pop(replica, None)
        self._killed.discard(replica)
        if not failures:
            return super().ended(replace(end, slot=replica), now)
        cause = next((each for each in failures if not each.follows), failures[0])
        if leaving:  # it had failed before, so this is not its answer to the order
            return str(cause)
        cause = replace(cause, slot=replica, joined=any(each.joined for each in failures))
        return super().ended(cause, now) or str(cause)

    def mates_to_kill(self, now: float) -> list[int]:
        """Returns the slots of replicas whose ranks to kill now, if they still run; each replica is returned once."""
        over = [replica for replica, at in self._kill_mates_at.items() if at <= now]
        for replica in over:
            del self._kill_mates_at[replica]
        self._killed.update(over)
        return [slot for replica in over for slot in self._slots_of(replica)]

    def restarts_due(self, now: float) -> list[int]:
        """Returns the slots of all ranks of the replicas to restart now; each restart is returned once."""
        return [slot for replica in super().restarts_due(now) for slot in self._slots_of(replica)]

    def _all_gone(self, replica: int) -> bool:
        """Counts the end of a rank; True for the last one of its replica."""
        gone = self._gone.pop(replica, 0) + 1
        if gone < self._size:
            self._gone[replica] = gone
        return gone == self._size

    def _unit(self, slot: int) -> int:
        return slot // self._size

    def _slots_of(self, replica: int) -> range:
        return range(replica * self._size, (replica + 1) * self._size)
