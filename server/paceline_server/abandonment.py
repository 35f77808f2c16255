"""When may the members of a generation be taken for dead, as an operator has allowed (--restart-after)? Pure.

Silence proves nothing (I2): a machine that is cut off may train on. So by default a job whose state may be on a silent
machine waits for an operator's `paceline restart`. Where whoever runs the coordinator knows that silent machines do not
come back, because something else starts them anew, the coordinator may say it in the operator's place.
"""

from __future__ import annotations

from paceline_server.model import JobState, View

__all__ = ["Abandonment"]


class Abandonment:
    """Watches one job.

    Time counts while no member of the last generation has had a stream, as far as this process has seen: neither before
    it was started nor while it did not run, for then nobody could have come back.

    Args:
        restart_after: seconds without any of them after which they are taken for dead; None for never.
    """

    def __init__(self, restart_after: float | None) -> None:
        self._restart_after = restart_after
        self._generation = 0
        self._since: float | None = None

    def due_at(self, now: float, state: JobState) -> float | None:
        """When its members are to be taken for dead; None as long as nothing is to be done. To be asked after events.

        Args:
            now: the time, in seconds.
            state: the job.
        """
        if self._restart_after is None:
            return None
        view = state.view
        if view is None or not _is_deserted(state, view):
            self._since = None
            return None
        if self._since is None or self._generation != view.generation:
            self._generation, self._since = view.generation, now
        # Without anybody who waits nothing is gained, and whoever held the state may still come back with it.
        return self._since + self._restart_after if state.candidates() else None

    def slept(self, seconds: float) -> None:
        """The coordinator did not run for so long."""
        if self._since is not None:
            self._since += seconds

    def done(self, state: JobState) -> str:
        """They are taken for dead. Returns a sentence for the log."""
        self._since = None
        generation = state.view.generation if state.view is not None else state.generation
        return (
            f"no member of generation {generation} has been connected for {self._restart_after:g} s: all of them are "
            "taken for dead (--restart-after)"
        )


def _is_deserted(state: JobState, view: View) -> bool:
    """True if there is a line that nobody of its last generation is here for."""
    if view.base is None or state.forming is not None or state.finished is not None:
        return False
    return all(session.stream is None for session in state.present())
