"""Tells jobs when to look at the clock: one timer for each, and a pulse that notices when the loop itself did not run.

A coordinator that was asleep must not call others silent, so every job hears of a stall before any job acts on a
deadline (`Wakefulness`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from paceline_protocol.coordinator import Event, Ticked, Wakefulness
from paceline_server.keeper import Job

_log = logging.getLogger(__name__)

_PULSE = 0.05
"""Seconds between two beats, which notice a stall of the loop; a beat costs some 10 us."""

_LONG_STALL = 0.5
"""Seconds of a stall that an operator should hear of: the default heartbeat interval."""


class Timers:
    """The timers of all jobs, on the running loop.

    `jobs` is looked at and not changed. `apply` raises nothing, because one round tells all jobs. `stalled` is called
    with the seconds for which the loop did not run.
    """

    def __init__(self, now: float, jobs: Mapping[str, Job], apply: Callable[[Job, Event], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs = jobs
        self._apply = apply
        self._wakefulness = Wakefulness(now, _PULSE)
        self._beat: asyncio.TimerHandle | None = None
        self._stopped = False
        self.stalled: Callable[[float], None] = lambda _: None

    def start(self) -> None:
        """Starts to notice stalls: those after this call."""
        self._wakefulness.awake(self._loop.time())
        self._pulse()

    def stop(self) -> None:
        """Cancels the pulse and all timers, for good: sessions end after this, and no job looks at the clock then."""
        self._stopped = True
        if self._beat is not None:
            self._beat.cancel()
        for job in self._jobs.values():
            if job.timer is not None:
                job.timer.cancel()

    def set(self, job: Job, deadline: float) -> None:
        """Makes the job look at the clock at `deadline` and not before; infinity for never."""
        if self._stopped:
            return
        if job.timer is not None:
            if job.timer.when() == deadline and not job.timer.cancelled():
                return
            job.timer.cancel()
        job.timer = self._loop.call_at(deadline, self._tick, job) if deadline < float("inf") else None

    def _tick(self, job: Job) -> None:
        job.timer = None
        self._note_stall()
        self._apply(job, Ticked())

    def _pulse(self) -> None:
        self._beat = self._loop.call_later(_PULSE, self._pulse)
        self._note_stall()

    def _note_stall(self) -> None:
        """Tells all jobs if the loop has slept, before any job looks at the clock."""
        slept = self._wakefulness.awake(self._loop.time())
        if slept:
            self.stalled(slept)
            level = logging.INFO if slept > _LONG_STALL and self._jobs else logging.DEBUG
            _log.log(level, "the coordinator did not run for %.2f s", slept)
            for job in list(self._jobs.values()):
                job.abandonment.slept(slept)
                self._apply(job, Ticked(slept))
