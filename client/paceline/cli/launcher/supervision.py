"""What to do when a worker ends: stop the others, start it again, or give up. Pure: time is an argument.

Exit           how a process ended, in words and as an exit code
Restarts       which worker is started again and when, and which is given up
SpareSchedule  how many warm processes wait, and when the next one is started
Supervision    when workers are stopped, and the launcher's exit code
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

__all__ = [
    "AT_ONCE_S",
    "DRAIN_S",
    "Exit",
    "GIVE_UP_AFTER",
    "KILL_AFTER_S",
    "Restart",
    "Restarts",
    "SETTLED_S",
    "SpareSchedule",
    "Supervision",
    "Terms",
    "default_spares",
    "in_order_of_blame",
    "shell_code",
    "spares_error",
]

AT_ONCE_S = 5.0
"""A worker that fails sooner than this, and in no view yet, has died at once: what kills it is in its start."""

GIVE_UP_AFTER = 3
"""So many deaths at once in a row: the next start would end in the same way."""

SETTLED_S = 60.0
"""A worker that has lived for this long was well: when it fails, it is started again as if it were the first time."""

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 10.0
"""Before a restart, doubled each time up to the longest."""

_PAUSE_S = 0.5
"""After a worker was started: it has the cores to itself while it joins, and the warm-up comes after that."""

_SPARE_FIRST_DELAY_S, _SPARE_LONGEST_DELAY_S = 1.0, 60.0
"""Of spares: between a failed one and the next, doubled each time up to the longest."""

KILL_AFTER_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""

DRAIN_S = 30.0
"""The same when the launcher of an elastic job is told to end: its workers leave at the end of their step."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one worker.

    Attributes:
        label: the worker as the user knows it: "rank 2", or "worker #2" if it never had a rank.
        pid: its process id.
        returncode: its exit code, or the negated number of the signal that killed it.
        follows: it failed over the failure of another member, and said so.
        slot: which of the launcher's workers it was, counted from 0; those who are started in its place share it.
        joined: it had been in a view.
    """

    label: str
    pid: int
    returncode: int
    follows: bool = False
    slot: int = 0
    joined: bool = False

    @property
    def how(self) -> str:
        """Completes "rank 2 ..."."""
        if self.returncode >= 0:
            return f"ended with exit code {self.returncode}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        return f"was killed by {name}"

    def __str__(self) -> str:
        return f"{self.label} (pid {self.pid}) {self.how}"


def shell_code(returncode: int) -> int:
    """The exit code as a shell gives it: 128 + signal for a process that a signal killed."""
    return returncode if returncode >= 0 else 128 - returncode


def in_order_of_blame(exits: Sequence[Exit]) -> list[Exit]:
    """Exits that were seen at the same moment, the likely cause first.

    A kill comes out of nowhere; a failing exit code within the same few milliseconds is most likely a peer's error
    over that kill.
    """
    return sorted(exits, key=lambda end: (end.follows, end.returncode >= 0, end.returncode == 0))


@dataclass(frozen=True, slots=True)
class Restart:
    """What is to be done about a failed worker.

    Attributes:
        text: one sentence for people; it tells of the failure too.
        at: when to start a new worker in its place; None for never.
    """

    text: str
    at: float | None = None


@dataclass(slots=True)
class _Slot:
    """The place of one worker, which one process after another may fill."""

    began: float = 0.0
    used: int = 0
    """Restarts so far."""
    delay: float = _FIRST_DELAY_S
    """Before the next one."""
    at_once: int = 0
    """Deaths at once in a row."""


class Restarts:
    """Decides for the workers of one launcher, each for itself.

    A worker that fails is started again as a new worker after a pause, which doubles from 0.1 s to 10 s: a cause that
    lasts (a full disk, a port in use) is not to be met a hundred times a second. It begins anew with a worker that has
    lived for a minute.

    Args:
        limit: how often each worker is started again at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: dict[int, _Slot] = {}

    def began(self, slot: int, now: float) -> None:
        """A worker was started."""
        self._slots.setdefault(slot, _Slot()).began = now

    def left(self, slot: int) -> int:
        """How often a worker may still be started again."""
        return self._limit - (self._slots[slot].used if slot in self._slots else 0)

    def failed(self, end: Exit, now: float) -> Restart:
        """A worker has failed."""
        slot = self._slots.setdefault(end.slot, _Slot(now))
        lived = now - slot.began
        slot.at_once = slot.at_once + 1 if lived < AT_ONCE_S and not end.joined else 0
        if not self._limit:
            return Restart(str(end))
        if slot.at_once >= GIVE_UP_AFTER:
            return Restart(
                f"giving up {end.label}: it failed {slot.at_once} times in a row within {AT_ONCE_S:g} s, before "
                f"it was in a view; the last one (pid {end.pid}) {end.how}"
            )
        if slot.used >= self._limit:
            used_up = "its only restart is" if self._limit == 1 else f"its {self._limit} restarts are"
            return Restart(f"{end}; {used_up} used up")
        if lived >= SETTLED_S:
            slot.delay = _FIRST_DELAY_S
        slot.used += 1
        delay, slot.delay = slot.delay, min(2 * slot.delay, _LONGEST_DELAY_S)
        text = (
            f"restarting {end.label} (pid {end.pid} {end.how}) as a new worker in {delay:g} s, "
            f"{slot.used} of {self._limit}"
        )
        return Restart(text, now + delay)


def default_spares(command: Sequence[str], restarts: int) -> int:
    """How many spares a launcher keeps where nobody has said: one if it is of use.

    Args:
        command: SCRIPT ARGS..., -m MODULE ARGS..., or -- PROGRAM ARGS...
        restarts: how often each worker is started again at most.
    """
    return 0 if spares_error(command, restarts, 1) else 1


def spares_error(command: Sequence[str], restarts: int, spares: int) -> str:
    """Why there cannot be so many spares; empty if there can."""
    if spares < 0:
        return f"--spares must be 0 or more, not {spares}"
    if spares and not restarts:
        return f"--spares {spares} is for workers that are started again: give --restarts too"
    if spares and command[0] == "--":
        return f"--spares {spares} does not go with --no-python: only Python's imports can be done early"
    return ""


class SpareSchedule:
    """Decides when one launcher starts spares.

    A spare that dies before it is needed is replaced after a pause, which doubles from 1 s to 60 s: what killed it
    (no memory, say) may kill the next one too. The pause is short again once a spare has become a worker.

    Args:
        limit: how many spares there are at most.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._next_at = 0.0
        self._delay = _SPARE_FIRST_DELAY_S

    def worker_started(self, now: float, from_spare: bool) -> None:
        """A worker was started."""
        self._next_at = max(self._next_at, now + _PAUSE_S)
        if from_spare:
            self._delay = _SPARE_FIRST_DELAY_S

    def failed(self, now: float) -> None:
        """A spare died, or could not be started."""
        self._next_at = max(self._next_at, now + self._delay)
        self._delay = min(2 * self._delay, _SPARE_LONGEST_DELAY_S)

    def wanted(self, restartable: int) -> int:
        """How many spares are of use: no more than there are workers that may be started again."""
        return min(self._limit, restartable)

    def due_at(self, spares: int, restartable: int) -> float | None:
        """The time at which to start the next spare; None if there are enough.

        Args:
            spares: how many there are.
            restartable: how many workers may be started again.
        """
        return self._next_at if spares < self.wanted(restartable) else None


@dataclass(frozen=True, slots=True)
class Terms:
    """What a launcher is to do about failures.

    Attributes:
        workers: how many it starts.
        minimum: with fewer the job does not go on.
        elastic: the job goes on without a worker that fails.
        alone: no other launcher brings workers.
        restarts: how often each worker is started again at most.
        spares: how many processes wait with their imports done, to be the next workers that are started again.
    """

    workers: int = 1
    minimum: int = 1
    elastic: bool = False
    alone: bool = True
    restarts: int = 0
    spares: int = 0


class Supervision:
    """Decides for one launcher.

    In a job of fixed size a worker that fails leaves the others `grace` seconds to end with their own typed error,
    which says more than any kill. Whoever is still there then is stopped: SIGTERM, and SIGKILL `KILL_AFTER_S` later.
    An interrupt stops all at once in the same way; a second one kills.

    In an elastic job a worker that fails is started again (`Restarts`), or is lost and the others go on. When too many
    are lost for the job ever to have its minimum again, the others are stopped as above. Workers that ended with 0
    count as there: they have done their part, and whoever still works at his is not to be cut off. An interrupt starts
    nobody again, and leaves `DRAIN_S` for the workers to leave in good order.

    The exit code:

    - 128 + the signal that told the launcher to end, if one did.
    - A worker counts by the last process in its place: a failure that was followed by a restart is made good.
    - In an elastic job, lost workers are forgiven as soon as another one ends with 0: it saw the job through without
      them. What fails after that counts again.
    - 0 if no failure is left. Otherwise that of the first worker that failed, but one that failed by itself comes
      before those that failed over others.

    Args:
        grace: seconds.
        terms: what is to be done about failures.
    """

    def __init__(self, grace: float, terms: Terms | None = None) -> None:
        self._grace = grace
        self._terms = terms or Terms()
        self._restarts = Restarts(self._terms.restarts)
        self._due: dict[int, tuple[float, Exit]] = {}  # who is to be started again, when, and after which failure
        self._lost: dict[int, Exit] = {}
        self._unforgiven: list[Exit] = []
        self._interrupt: signal.Signals | None = None
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._sent: set[signal.Signals] = set()

    @property
    def stopping(self) -> bool:
        """True once workers were told to stop: what they do then is no failure of theirs."""
        return bool(self._sent)

    @property
    def interrupted(self) -> bool:
        """True once the launcher was told to end."""
        return self._interrupt is not None

    @property
    def restarting(self) -> bool:
        """True while a worker is to be started again."""
        return bool(self._due)

    def restartable(self, running: Collection[int]) -> int:
        """How many workers may be started again, or are about to be.

        Args:
            running: the workers that run.
        """
        if self.stopping or self.interrupted or self._stop_at is not None:
            return 0
        return len(self._due) + sum(self._restarts.left(slot) > 0 for slot in running)

    @property
    def deadline(self) -> float | None:
        """When `due` or `restarts_due` will next have something, None for never."""
        pending = [
            at
            for at, sent in ((self._stop_at, signal.SIGTERM), (self._kill_at, signal.SIGKILL))
            if at is not None and sent not in self._sent
        ]
        return min([*pending, *(at for at, _ in self._due.values())], default=None)

    @property
    def failure(self) -> Exit | None:
        """The failure that the exit code is of, by the rule above; None if none is left."""
        if not self._unforgiven:
            return None
        return next((end for end in self._unforgiven if not end.follows), self._unforgiven[0])

    @property
    def exit_code(self) -> int:
        """The launcher's exit code, by the rule above."""
        if self._interrupt is not None:
            return 128 + self._interrupt
        return 0 if self.failure is None else shell_code(self.failure.returncode)

    @property
    def summary(self) -> str:
        """What is left to be said when all have ended, empty for nothing."""
        if self.exit_code or not self._lost:
            return ""
        lost = " and ".join(f"{end.label} (pid {end.pid} {end.how})" for end in self._lost.values())
        return f"the others saw the job through without {lost}"

    def began(self, slot: int, now: float) -> None:
        """A worker was started."""
        self._restarts.began(slot, now)

    def ended(self, end: Exit, now: float) -> str:
        """A worker has ended.

        Returns:
            One sentence on what is done about it; empty if the job is of fixed size, or nothing is.
        """
        if self.stopping or self.interrupted:
            return ""
        if end.returncode == 0:
            if self._terms.elastic:
                self._unforgiven.clear()
            return ""
        if not self._terms.elastic:
            self._lose(end, now)
            return ""
        restart = self._restarts.failed(end, now)
        if restart.at is not None and self._stop_at is None:
            self._due[end.slot] = restart.at, end
            return restart.text
        return f"{str(end) if restart.at is not None else restart.text}{self._lose(end, now)}"

    def restarts_due(self, now: float) -> list[int]:
        """The workers to start again now; each comes once."""
        slots = sorted(slot for slot, (at, _) in self._due.items() if at <= now)
        for slot in slots:
            del self._due[slot]
        return slots

    def stop(self, now: float) -> None:
        """The workers are to end, through no fault of theirs."""
        self._due.clear()
        if not self._sent:
            self._stop_at = now

    def interrupt(self, signum: signal.Signals, now: float) -> None:
        """The launcher got a signal to end: the first one stops the workers, the second kills them."""
        self._due.clear()
        if self._interrupt is None:
            self._interrupt = signum
            self._stop_at = now
        else:
            self._kill_at = now

    def due(self, now: float) -> signal.Signals | None:
        """The signal to send to all workers now, or None; each comes once."""
        if self._kill_at is not None and now >= self._kill_at and signal.SIGKILL not in self._sent:
            self._sent |= {signal.SIGTERM, signal.SIGKILL}
            return signal.SIGKILL
        if self._stop_at is not None and now >= self._stop_at and signal.SIGTERM not in self._sent:
            self._sent.add(signal.SIGTERM)
            self._kill_at = now + (DRAIN_S if self._interrupt is not None and self._terms.elastic else KILL_AFTER_S)
            return signal.SIGTERM
        return None

    def _lose(self, end: Exit, now: float) -> str:
        """A failure that no restart makes good. Returns what that means for the others, to follow on a sentence."""
        self._lost[end.slot] = end
        self._unforgiven.append(end)
        left = self._terms.workers - len(self._lost)
        if self._terms.elastic and (left >= self._terms.minimum or not self._terms.alone):
            return "; the others go on" if left else ""
        if self._stop_at is not None:
            return ""
        self._stop_at = now + self._grace
        # Nobody is started into a job that cannot go on: those who were to be are lost too.
        for slot, (_, failed) in self._due.items():
            self._lost[slot] = failed
            self._unforgiven.append(failed)
        self._due.clear()
        return f"; the job needs {self._terms.minimum} workers and cannot get them any more" if left else ""
