"""Workers that are on their way: a launcher says how many it has started, and the first view waits for them. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paceline_protocol._job_state import Session

LONGEST_S = 60.0
"""Most seconds after a launcher's first worker for which the others are waited for. Heavy imports take most of that."""

_KEPT = 4096
"""Most launches that are remembered, the latest ones. An older one is not waited for."""

_OVER = float("-inf")


class Launch(NamedTuple):
    """One run of a launcher, how many workers it started at its beginning, and for how many seconds to wait for them.

    A worker's patience is shorter than its time for joining, so that the job begins without the others in that time.
    """

    id: str
    workers: int
    patience: float = LONGEST_S


class Awaited(NamedTuple):
    """How many workers of a launcher have not come yet, the host of those that have, and until when to wait."""

    missing: int
    host: str
    until: float


class Launches:
    """Until when a coordinator's jobs wait for the workers of each launch.

    They do not wait any more once a process of the launch has ended, or a view has formed with some of its workers. A
    process may end before any other has joined, when there is no job yet; so all jobs of a coordinator share this.
    """

    def __init__(self) -> None:
        self._until: OrderedDict[str, float] = OrderedDict()

    def joined(self, now: float, launch: Launch) -> None:
        """Notes that a worker has come."""
        self._note(launch.id, min(self._until.get(launch.id, now + LONGEST_S), now + launch.patience))

    def over(self, launch_id: str) -> None:
        """Notes that the rest of a launch is not waited for any more."""
        self._note(launch_id, _OVER)

    def awaited(self, now: float, candidates: Iterable[Session]) -> Awaited | None:
        """Returns the workers that are waited for longest, among the launches of these candidates; None for none."""
        there: dict[Launch, set[tuple[str, int]]] = {}  # processes, as one may join twice
        for session in candidates:
            if session.launch is not None and now < self._until.get(session.launch.id, _OVER):
                there.setdefault(session.launch, set()).add((session.process.host, session.process.pid))
        waits = (
            Awaited(launch.workers - len(processes), min(processes)[0], self._until[launch.id])
            for launch, processes in there.items()
            if len(processes) < launch.workers
        )
        return max(waits, key=lambda wait: wait.until, default=None)

    def _note(self, launch_id: str, until: float) -> None:
        self._until[launch_id] = until
        self._until.move_to_end(launch_id)
        if len(self._until) > _KEPT:
            self._until.popitem(last=False)
