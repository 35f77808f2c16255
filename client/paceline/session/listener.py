"""The events that a control stream reports to its session."""

from __future__ import annotations

from typing import Protocol

from paceline import errors
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["Listener"]


class Listener(Protocol):
    """Handles events of a control stream, on the loop thread; the methods must not block."""

    def on_registered(self) -> None:
        """`registered` is there, or has changed: after each connection, and when a line has ended."""

    def on_waiting(self, reason: str) -> None:
        """There is no view yet, for this reason."""

    def on_view(self, view: pb.ViewFormed) -> None:
        """A view has formed."""

    def on_verdict(self, verdict: pb.Verdict) -> None:
        """The generation is void."""

    def on_barrier(self, call: int, failed: pb.BarrierFailed | None) -> None:
        """A barrier was passed, or failed."""

    def on_ended(self, error: errors.PacelineError) -> None:
        """The session is over for good."""

    def on_closed(self) -> None:
        """The coordinator has shut down for good, which ends the session: it need not be told of leaving."""

    def on_broken(self, error: BaseException) -> None:
        """The session has failed unexpectedly: this member cannot go on."""

    def on_reconnected(self) -> None:
        """A broken stream was resumed: requests without an answer must be sent again."""

    def on_disconnected(self) -> None:
        """The stream broke."""

    def on_new_session(self) -> None:
        """The old session had ended; this worker is a new member now, in no view."""

    async def on_away(self, timeout: float) -> str:
        """Returns this member's new address, "host:port", before it is introduced again; empty if it is unchanged.

        Args:
            timeout: seconds to wait for a new address if the old one has gone.

        Raises:
            CoordinatorUnreachable, LinkUnavailable: there is no address yet.
        """

    def on_line(self, message: pb.SessionResponse) -> None:
        """A message about the line arrived: running, summons, catch_up, misfit, drain, dismissed or finished."""
