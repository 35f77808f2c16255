"""Decides what to do when a worker ends: stop the others, restart it, or give it up. Pure: time is an argument."""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass

AT_ONCE_S = 5.0
"""A worker that fails within so many seconds, before it was in a view, died at once: its start-up kills it."""

GIVE_UP_AFTER = 3
"""After so many deaths at once in a row, a worker is given up: the next start would end in the same way."""

SETTLED_S = 60.0
"""A worker that ran for so many seconds was healthy: if it then fails, its restart delay begins anew."""

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 10.0
"""Seconds before a restart, doubled each time up to the longest."""

KILL_AFTER_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""

DRAIN_S = 30.0
"""The same if the launcher of an elastic job is told to end: its workers leave at the end of their step."""

SAME_S = 1.0
"""Two SIGTERMs within so many seconds are one: a scheduler may signal this process, its group and its whole job."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one worker, or of one rank of a replica.

    Attributes:
        label: the worker as the user knows it: "rank 2", or "worker #2" if it never had a rank.
        pid: its process id.
        returncode: its exit code, or the negated number of the signal that killed it.
        follows: it failed because another member failed, and said so, as workers do through the pipe of `paceline run`.
        slot: its number among the launcher's workers, from 0; its replacements have the same.
        joined: it had been in a view.
        unfinished: it had steps of `session.steps` to take, and was not told to leave; known by the same pipe.
        position: its rank in its replica, which `label` names; None if it is a worker by itself.
        words: how it ended, in words that complete "rank 2 ...", if it has no exit code, as when its machine is gone.
    """

    label: str
    pid: int
    returncode: int
    follows: bool = False
    slot: int = 0
    joined: bool = False
    unfinished: bool = False
    position: int | None = None
    words: str = ""

    @property
    def how(self) -> str:
        """How the process ended, as a phrase that completes "rank 2 ..."."""
        if self.words:
            return self.words
        # The coordinator has words of its own for the same end (`ExitReported.how`): it knows nothing of steps.
        if self.returncode >= 0:
            early = " before the last step" if self.unfinished and not self.returncode else ""
            return f"ended with exit code {self.returncode}{early}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            name = f"signal {-self.returncode}"
        return f"was killed by {name}"

    @property
    def _named(self) -> str:
        """Names the worker or replica that has ended, and says how."""
        rank = "" if self.position is None else f"rank {self.position}, "
        return f"{self.label} ({rank}pid {self.pid} {self.how})"

    @property
    def _again(self) -> str:
        """As what it is restarted."""
        return "as a new worker" if self.position is None else "as a whole"

    def __str__(self) -> str:
        rank = "" if self.position is None else f"rank {self.position} of "
        return f"{rank}{self.label} (pid {self.pid}) {self.how}"


def shell_code(returncode: int) -> int:
    """Returns the exit code as a shell does: 128 + signal for a process that a signal killed."""
    return returncode if returncode >= 0 else 128 - returncode


def likely_cause_first(exits: Sequence[Exit]) -> list[Exit]:
    """Sorts exits that were seen at the same moment, the likely cause first.

    A failing exit code within a few milliseconds of a kill is most likely a peer's error about that kill.
    """
    return sorted(exits, key=lambda end: (end.follows, end.returncode >= 0, end.returncode == 0))


@dataclass(frozen=True, slots=True)
class Restart:
    """The decision about a failed worker.

    Attributes:
        text: one sentence for people, which also reports the failure.
        at: when to start a new worker in its place; None for never.
    """

    text: str
    at: float | None = None


@dataclass(slots=True)
class _Slot:
    """The state of one worker's slot, which successive processes may fill."""

    began: float = 0.0
    used: int = 0
    """Restarts so far."""
    delay: float = _FIRST_DELAY_S
    """Seconds before the next restart."""
    at_once: int = 0
    """Deaths at once in a row."""


class Restarts:
    """Decides about restarts of one launcher's workers, each separately, `limit` times each.

    A failed worker is restarted as a new worker after a pause, which doubles from 0.1 s to 10 s, so that a lasting
    cause (a full disk, a port in use) does not cause a hundred restarts a second. The pause begins anew after a worker
    that ran for a minute.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._slots: dict[int, _Slot] = {}

    def began(self, slot: int, now: float) -> None:
        """Records that a worker was started."""
        self._slots.setdefault(slot, _Slot()).began = now

    def left(self, slot: int) -> int:
        """Returns how often a worker may still be restarted."""
        return self._limit - (self._slots[slot].used if slot in self._slots else 0)

    def failed(self, end: Exit, now: float) -> Restart:
        """Decides about a worker that has failed."""
        slot = self._slots.setdefault(end.slot, _Slot(now))
        lived = now - slot.began
        slot.at_once = slot.at_once + 1 if lived < AT_ONCE_S and not end.joined else 0
        if not self._limit:
            return Restart(str(end))
        if slot.at_once >= GIVE_UP_AFTER:
            return Restart(
                f"giving up on {end.label}: it failed {slot.at_once} times in a row within {AT_ONCE_S:g} s, before "
                f"it had joined the job; the last process (pid {end.pid}) {end.how}"
            )
        if slot.used >= self._limit:
            used_up = "its only restart is" if self._limit == 1 else f"its {self._limit} restarts are"
            return Restart(f"{end}; {used_up} used up")
        if lived >= SETTLED_S:
            slot.delay = _FIRST_DELAY_S
        slot.used += 1
        delay, slot.delay = slot.delay, min(2 * slot.delay, _LONGEST_DELAY_S)
        count = "its only restart" if self._limit == 1 else f"{slot.used} of its {self._limit} restarts"
        text = f"restarting {end._named} {end._again} in {delay:g} s ({count})"
        return Restart(text, now + delay)


@dataclass(frozen=True, slots=True)
class Terms:
    """The rules by which a launcher acts on failures.

    Attributes:
        workers: how many workers it starts.
        minimum: the job does not go on with fewer workers.
        elastic: the job goes on without a worker that fails.
        alone: no other launcher starts workers for the job.
        restarts: how often each worker is restarted at most.
        drained_code: the launcher's exit code if its workers were told to leave and have left in good order.
    """

    workers: int = 1
    minimum: int = 1
    elastic: bool = False
    alone: bool = True
    restarts: int = 0
    drained_code: int = 0


class Supervision:
    """Decides when a launcher stops and restarts workers, and its exit code.

    In a job of fixed size, when a worker fails, the others have `grace` seconds to end with their own typed error,
    which says more than a kill would. Workers that still run then get SIGTERM, and SIGKILL `KILL_AFTER_S` later. An
    interrupt stops all workers immediately in the same way; a second interrupt kills them. An order to drain is like an
    interrupt, except that the first signal after it counts as the same order: it says again that the machine goes.

    In an elastic job, a worker that fails is restarted (`Restarts`), or is lost and the others go on. When so many are
    lost that the job can never reach its minimum again, the others are stopped as above. Workers that ended with 0
    count as present, since they have done their part, and the others must be able to finish theirs; but one that ended
    with 0 in the middle of its steps is lost too. No worker is restarted once the job is done. After an interrupt none
    is either, and the workers have `DRAIN_S` to leave in good order, or the time that came with the order.

    The exit code:

    - 128 + the signal that told the launcher to end, if one did. But `drained_code` (0) if that was SIGTERM, the job is
      elastic, and all workers that still ran left with 0: they were drained, as a scheduler wanted it, and workers
      that were lost before do not matter. Ctrl-C never gives 0, so that a shell does not go on with its next command.
    - A worker counts by the last process in its slot: a restart makes up for the failure before it.
    - In an elastic job, lost workers are forgiven as soon as another one ends with 0, because it completed the job
      without them. Failures after that count again.
    - 0 if no failure is left. Otherwise that of the first worker that failed, where one that failed by itself comes
      before those that failed because of others. It is 1 for a worker that ended with 0 in the middle of its steps.

    Args:
        grace: seconds.
        terms: what to do about failures.
    """

    _members = "workers"
    """The noun for the contents of slots, in sentences."""

    def __init__(self, grace: float, terms: Terms | None = None) -> None:
        self._grace = grace
        self._terms = terms or Terms()
        self._restarts = Restarts(self._terms.restarts)
        self._due: dict[int, tuple[float, Exit]] = {}  # pending restarts by slot: when, and after which failure
        self._job_is_done = False
        self._hung: set[int] = set()
        self._lost: dict[int, Exit] = {}
        self._unforgiven: list[Exit] = []
        self._interrupt: signal.Signals | None = None
        self._signalled_at: float | None = None  # the first signal
        self._drain_s = DRAIN_S
        self._drained: list[int] = []  # the exit codes of workers that ended after the interrupt
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._sent: set[signal.Signals] = set()

    @property
    def stopping(self) -> bool:
        """True once workers have been told to stop; their ends after that are not failures."""
        return bool(self._sent)

    @property
    def interrupted(self) -> bool:
        """True once the launcher has been told to end."""
        return self._interrupt is not None

    @property
    def interrupted_by(self) -> signal.Signals | None:
        """The signal by which it was; SIGTERM for `drain`."""
        return self._interrupt

    @property
    def restarting(self) -> bool:
        """True while a restart is pending."""
        return bool(self._due)

    def restartable(self, running: Collection[int]) -> int:
        """Returns how many workers may be restarted, now or later.

        Args:
            running: the slots of the workers that run.
        """
        if not self._restarts_workers:
            return 0
        return len(self._due) + sum(self._restarts.left(slot) > 0 for slot in running)

    def ends_hung(self, slot: int) -> bool:
        """Whether to kill a worker that hangs: a new one may start in its place, or the job is done without it."""
        if self._job_is_done:
            return not self.interrupted
        return self._terms.elastic and self._restarts_workers and self._restarts.left(self._unit(slot)) > 0

    def killed_hung(self, slot: int) -> None:
        """Records that a worker was killed because it hung: that is no failure if the job is done without it."""
        self._hung.add(self._unit(slot))

    @property
    def deadline(self) -> float | None:
        """The time at which `due` or `restarts_due` will next return something; None for never."""
        pending = [
            at
            for at, sent in ((self._stop_at, signal.SIGTERM), (self._kill_at, signal.SIGKILL))
            if at is not None and sent not in self._sent
        ]
        return min([*pending, *(at for at, _ in self._due.values())], default=None)

    @property
    def failure(self) -> Exit | None:
        """The failure that determines the exit code, by the rule above; None if none is left."""
        if not self._unforgiven:
            return None
        return next((end for end in self._unforgiven if not end.follows), self._unforgiven[0])

    @property
    def exit_code(self) -> int:
        """The launcher's exit code, by the rule above."""
        if self._interrupt is not None:
            well = self._terms.elastic and bool(self._drained) and not any(self._drained)
            drained = well and self._interrupt is signal.SIGTERM
            return self._terms.drained_code if drained else 128 + self._interrupt
        return 0 if self.failure is None else shell_code(self.failure.returncode) or 1

    @property
    def summary(self) -> str:
        """A last sentence for when all have ended; empty if there is nothing to say."""
        if self.exit_code or not self._lost:
            return ""
        lost = " and ".join(end._named for end in self._lost.values())
        return f"the others finished the job without {lost}"

    def began(self, slot: int, now: float) -> None:
        """Records that a worker was started."""
        self._restarts.began(slot, now)

    @property
    def job_is_done(self) -> bool:
        """True if an elastic job is done, as far as this launcher knows."""
        return self._job_is_done

    def job_done(self, done: bool, now: float) -> None:
        """Records whether the job is done, as workers say at the end of their steps: then none is restarted.

        Workers may begin another one after it, for which some of them may be lost.
        """
        if not self._terms.elastic or done == self._job_is_done:
            return
        self._job_is_done = done
        if done:
            self._lose_pending()
        elif not self._has_enough and self._stop_at is None:
            self._stop_at = now + self._grace

    def ended(self, end: Exit, now: float) -> str:
        """Decides what to do about a worker that has ended.

        A worker that was drained ends with 0, and so counts as present, as one that has done its part does. If you
        drain workers for good, and the job should stop below its minimum, count those that run and call `stop`.

        Returns:
            One sentence about the decision; empty if the job is of fixed size, or there is nothing to do.
        """
        hung = end.slot in self._hung
        self._hung.discard(end.slot)
        if self.interrupted:
            self._drained.append(end.returncode)
        if self.stopping or self.interrupted:
            return ""
        if end.returncode == 0 and end.unfinished:  # its script wanted that, so it is not started again
            return f"{end}{self._lose(end, now)}"
        if end.returncode == 0:
            if self._terms.elastic:
                self._unforgiven.clear()
            return ""
        if not self._terms.elastic:
            self._lose(end, now)
            return ""
        if self._job_is_done:
            if not hung:
                self._record_loss(end)
            return str(end)
        restart = self._restarts.failed(end, now)
        if restart.at is not None and self._stop_at is None:
            self._due[end.slot] = restart.at, end
            return restart.text
        return f"{str(end) if restart.at is not None else restart.text}{self._lose(end, now)}"

    def restarts_due(self, now: float) -> list[int]:
        """Returns the slots whose workers to restart now; each restart is returned once."""
        slots = sorted(slot for slot, (at, _) in self._due.items() if at <= now)
        for slot in slots:
            del self._due[slot]
        return slots

    def stop(self, now: float) -> None:
        """Orders the workers to be stopped, though none has failed."""
        self._due.clear()
        if not self._sent:
            self._stop_at = now

    def interrupt(self, signum: signal.Signals, now: float) -> None:
        """Handles a signal that tells the launcher to end: the first stops the workers, the second kills them.

        The first signal after `drain`, and a SIGTERM within `SAME_S` of another, repeat an order and change nothing.
        """
        self._due.clear()
        if self._signalled_at is None:
            if self._interrupt is None:
                self._stop_at = now
            self._interrupt, self._signalled_at = signum, now
        elif {signum, self._interrupt} != {signal.SIGTERM} or now - self._signalled_at > SAME_S:
            self._kill_at = now

    def drain(self, now: float, seconds: float = DRAIN_S) -> None:
        """Orders the workers to leave as SIGTERM does, unless they have been told already.

        Args:
            now: the time.
            seconds: how long the workers of an elastic job have, until they are killed.
        """
        self._due.clear()
        if self._interrupt is None:
            self._interrupt = signal.SIGTERM
            self._drain_s = seconds
            self._stop_at = now

    def due(self, now: float) -> signal.Signals | None:
        """Returns the signal to send to all workers now, or None; each signal is returned once."""
        if self._kill_at is not None and now >= self._kill_at and signal.SIGKILL not in self._sent:
            self._sent |= {signal.SIGTERM, signal.SIGKILL}
            return signal.SIGKILL
        if self._stop_at is not None and now >= self._stop_at and signal.SIGTERM not in self._sent:
            self._sent.add(signal.SIGTERM)
            leaves = self._interrupt is not None and self._terms.elastic
            self._kill_at = now + (self._drain_s if leaves else KILL_AFTER_S)
            return signal.SIGTERM
        return None

    def _lose(self, end: Exit, now: float) -> str:
        """Records a failure that is not followed by a restart; returns its effect on the others, to end a sentence."""
        self._record_loss(end)
        left = self._terms.workers - len(self._lost)
        if self._terms.elastic and self._has_enough:
            here = "" if self._terms.alone else " here"
            return (
                f"; {left} of {self._terms.workers} {self._members}{here} {'is' if left == 1 else 'are'} left"
                if left
                else ""
            )
        if self._stop_at is not None:
            return ""
        self._stop_at = now + self._grace
        self._lose_pending()
        return f"; the job needs {self._terms.minimum} {self._members} and cannot get them any more" if left else ""

    def _lose_pending(self) -> None:
        """Loses workers whose restart is pending, because no worker is restarted any more."""
        for _, failed in self._due.values():
            self._record_loss(failed)
        self._due.clear()

    def _record_loss(self, end: Exit) -> None:
        self._lost[end.slot] = end
        self._unforgiven.append(end)

    @property
    def _has_enough(self) -> bool:
        """True as long as the job can have its minimum of workers."""
        return not self._terms.alone or self._terms.workers - len(self._lost) >= self._terms.minimum

    @property
    def _restarts_workers(self) -> bool:
        """True as long as workers that fail may be restarted."""
        return not (self.stopping or self.interrupted or self._stop_at is not None or self._job_is_done)

    def _unit(self, slot: int) -> int:
        """The slot in which a worker counts and is restarted."""
        return slot
