"""What a control stream tells the session that it serves."""

from __future__ import annotations

from typing import Protocol

from paceline import errors
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["Listener"]


class Listener(Protocol):
    """What the session wants to hear, on the loop thread; it must not block."""

    def on_waiting(self, reason: str) -> None:
        """No view yet, and why."""

    def on_view(self, view: pb.ViewFormed) -> None:
        """A view has formed."""

    def on_verdict(self, verdict: pb.Verdict) -> None:
        """The generation is void."""

    def on_barrier(self, call: int, failed: pb.BarrierFailed | None) -> None:
        """A barrier was passed, or failed."""

    def on_ended(self, error: errors.PacelineError) -> None:
        """The session is over and will not come back."""

    def on_closed(self) -> None:
        """The coordinator has ended for good, in good order, and this session with it: no goodbye is needed."""

    def on_broken(self, error: BaseException) -> None:
        """Something of the session has failed that should not: this member cannot go on."""

    def on_reconnected(self) -> None:
        """A broken stream was taken up again: what was in flight must be sent again."""

    def on_disconnected(self) -> None:
        """The stream broke."""

    def on_new_session(self) -> None:
        """The old session had ended; this is a new member now, in no view."""

    async def on_away(self, timeout: float) -> str:
        """About to introduce this member again: where peers reach it if that has changed, "host:port"; else empty.

        Args:
            timeout: seconds to wait for an address that is in place of one that has gone.

        Raises:
            CoordinatorUnreachable, LinkUnavailable: nowhere yet.
        """

    def on_line(self, message: pb.SessionResponse) -> None:
        """Something about the line: running, summons, catch_up, misfit, drain, dismissed or finished."""
