"""Keeps a tally of each job, and the last events, for the page, metrics and commands.

The dispatcher tells the observatory what happens. If counting fails, that is logged, and the job goes on: what watches
a job must not end it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from paceline_protocol.coordinator import Effect, Event, JobState
from paceline_server.happenings import Happening
from paceline_server.measures import Histogram
from paceline_server.tally import Tally

_log = logging.getLogger(__name__)

MOST_EVENTS = 10_000
"""Events of all jobs that are kept; each takes 0.5 KB at most."""

SHOWN_EVENTS = 20
"""Events of one job that are shown with it."""

_KEPT_S = 300.0
"""Seconds for which the tally of a job is kept after it has come to rest: Prometheus reads some times a minute."""

_MOST_AT_REST = 1_000


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job; `text` is one sentence, and admin.proto has the kinds.

    `number` grows by 1 from each event to the next, over all jobs, and by more with a restart of the coordinator. `at`
    is in seconds since 1970, as the coordinator's clock stood when it was started.
    """

    number: int
    at: float
    job: str
    kind: str
    generation: int
    text: str


class Observatory:
    """All tallies and events.

    `epoch` is the seconds since 1970 at time 0 of the clock that `saw` is given. Events get numbers above
    `last_number`: a coordinator gives the time at which it starts, in milliseconds, so that those who have events of
    the one before it can tell them from its own. `commits` is how long it took to store views. `miscounted` names jobs
    of which something could not be counted.
    """

    def __init__(self, epoch: float, last_number: int = 0) -> None:
        self._epoch = epoch
        self._tallies: dict[str, Tally] = {}
        self._recent: dict[str, deque[JobEvent]] = {}
        self._at_rest: OrderedDict[str, float] = OrderedDict()  # since when, the first that came to rest first
        self._events: deque[JobEvent] = deque(maxlen=MOST_EVENTS)
        self._number = last_number
        self.miscounted: set[str] = set()
        self.commits = Histogram()

    def begin(self, now: float, state: JobState) -> None:
        """Begins to count a job, unless it is counted already."""
        if state.name not in self._tallies:
            self._tallies[state.name] = Tally(now, state)
            self._recent[state.name] = deque(maxlen=SHOWN_EVENTS)
        self._at_rest.pop(state.name, None)

    def saw(self, now: float, event: Event, effects: Iterable[Effect], state: JobState, reason: str) -> None:
        """Takes note of an event of a job and of what followed, after which it is in `state`; raises nothing."""
        tally = self._tallies.get(state.name)
        if tally is None:
            return
        try:
            for happening in [*tally.saw(now, event, effects, state), *tally.reason(now, reason)]:
                self._add(now, state.name, happening)
        except Exception:  # noqa: BLE001  whatever it is, training must go on
            if state.name not in self.miscounted:
                self.miscounted.add(state.name)
                _log.exception("job %s: what its metrics and events say may be wrong from now on", state.name)

    def rest(self, now: float, name: str) -> None:
        """Takes note that a job has come to rest; its tally stays for a while."""
        if name in self._tallies:
            self._at_rest[name] = now
            self._at_rest.move_to_end(name)
        while self._at_rest:
            oldest, since = next(iter(self._at_rest.items()))
            if len(self._at_rest) <= _MOST_AT_REST and since > now - _KEPT_S:
                return
            self.forget(oldest)

    def forget(self, name: str) -> None:
        """Drops what is known of a job, but for its events."""
        self._at_rest.pop(name, None)
        self._tallies.pop(name, None)
        self._recent.pop(name, None)
        self.miscounted.discard(name)

    def tally(self, now: float, name: str) -> Tally | None:
        """Returns a job's tally; None if the job is unknown, or has been at rest for long."""
        since = self._at_rest.get(name)
        return self._tallies.get(name) if since is None or since > now - _KEPT_S else None

    def counted(self, now: float) -> list[str]:
        """Returns the names of the jobs that have a tally, those that came to rest last."""
        resting = [name for name, since in self._at_rest.items() if since > now - _KEPT_S]
        return [*(name for name in self._tallies if name not in self._at_rest), *reversed(resting)]

    def recent(self, name: str) -> list[JobEvent]:
        """Returns a job's last events, oldest first; of checkpoints in a row only the last."""
        return list(self._recent.get(name, ()))

    def wall_clock(self, now: float) -> float:
        """Returns a time as seconds since 1970."""
        return round(self._epoch + now, 3)

    def events(self, job: str, after: int, most: int) -> tuple[list[JobEvent], int]:
        """Returns events, oldest first, and the number of the last one that was looked at.

        An empty `job` is all jobs. Events have numbers above `after`; one that this coordinator has not reached counts
        as 0.
        """
        if after > self._number:
            after = 0
        first = self._events[0].number if self._events else self._number + 1
        found: list[JobEvent] = []
        looked = max(after, first - 1)
        for event in islice(self._events, looked + 1 - first, None):
            if len(found) >= most:
                break
            looked = event.number
            if not job or event.job == job:
                found.append(event)
        return found, looked

    def _add(self, now: float, job: str, happening: Happening) -> None:
        self._number += 1
        event = JobEvent(self._number, self.wall_clock(now), job, happening.kind, happening.generation, happening.text)
        self._events.append(event)
        recent = self._recent[job]
        if recent and event.kind == recent[-1].kind == "checkpoint":  # many of them would push out all others
            recent.pop()
        recent.append(event)
