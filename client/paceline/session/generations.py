"""A member's generations at its own side: the one that its group is in, one that has come, and what ends each.

A verdict may arrive before the links of its generation are made, and a report may be lost with the stream that it went
out on: so both are kept until they have done their work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from paceline._loop import LoopThread
from paceline.config import Config
from paceline.credentials import Credentials
from paceline.links.base import Peer
from paceline.links.fault import Fault, Suspicion, Verdict
from paceline.links.grpc_mesh import GrpcMesh
from paceline.links.negotiation import Ways
from paceline.links.nowhere import NoMesh
from paceline.session.control import ControlStream
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Generations"]

_AWAY_S = 0.05
"""Seconds for a stream to the coordinator that was reset to be there again; one whose process died is not."""


class Generations:
    """One member's.

    Args:
        job: name of the job.
        config: timeouts.
        thread: the loop.
        credentials: by what members know each other.
        ways: the halves of links that this member has.

    Attributes:
        control: the stream; set once there is one.
        mesh: the links that the group uses; None until `join` has got that far.
        coming: links of a view that the group has yet to move to.
    """

    control: ControlStream

    def __init__(self, job: str, config: Config, thread: LoopThread, credentials: Credentials, ways: Ways) -> None:
        self.mesh: GrpcMesh | NoMesh | None = None
        self.coming: GrpcMesh | None = None
        self._job = job
        self._config = config
        self._thread = thread
        self._credentials = credentials
        self._ways = ways
        self._away = False
        self._patience = _AWAY_S
        self._early: Verdict | None = None  # on a view that is being adopted
        self._reported: pb.SessionRequest | None = None

    def move(self, mesh: GrpcMesh) -> None:
        """The group goes on in the next generation; on the training thread."""
        self.mesh = mesh
        if self.coming is mesh:
            self.coming = None
        self._reported = None

    # On the loop.

    def formed(self, generation: int) -> None:
        """A view has formed: the generation that the group is in is over."""
        self._early = None
        if self.mesh is not None:
            self.mesh.retire()
            # Whoever went on in the old one while the coordinator was away, and is in a step, stops there.
            self.outdate(f"generation {generation} has formed")

    def make(self, view: pb.ViewFormed, peers: Sequence[Peer]) -> GrpcMesh:
        """The links of a view."""
        fault = Fault(view.generation, view.rank, self._config.verdict_timeout, str(peers[view.rank]))
        fault.on_suspicion(functools.partial(self._report, view.generation))
        if self._early is not None and self._early.generation == view.generation:
            fault.settle(self._early)
        return GrpcMesh(
            self._job,
            view.generation,
            view.rank,
            peers,
            fault,
            self._thread,
            self._config.failure_timeout,
            self._credentials,
            self._ways,
        )

    def settle(self, verdict: Verdict) -> bool:
        """Ends a generation. Returns whether there are links of it yet; if not, the verdict waits for them."""
        for mesh in (self.coming, self.mesh):
            if mesh is not None and verdict.generation == mesh.generation:
                mesh.fault.settle(verdict)
                return True
        self._early = verdict
        return False

    def outdate(self, text: str) -> None:
        """Ends the generation that the group is in, if any: it is over, and the session goes on in another one."""
        if self.mesh is not None:
            stale = ErrorReason.ERROR_REASON_STALE_GENERATION
            self.mesh.fault.settle(Verdict(self.mesh.generation, stale, (), 0, text))

    def session_ended(self, text: str) -> None:
        """Ends the generation that the group is in, if any: this member has no session any more, and gets no other."""
        if self.mesh is not None:
            ended = ErrorReason.ERROR_REASON_SESSION_ENDED
            self.mesh.fault.settle(Verdict(self.mesh.generation, ended, (self.mesh.rank,), 0, text))

    def cut_off(self, text: str) -> None:
        """All links break off, at this member's own side: nobody else is to be suspected of that."""
        for mesh in (self.coming, self.mesh):
            if mesh is not None:
                stale = ErrorReason.ERROR_REASON_STALE_GENERATION
                mesh.fault.settle(Verdict(mesh.generation, stale, (mesh.rank,), 0, text))

    def broke(self, error: BaseException, view: pb.ViewFormed | None = None) -> None:
        """This member cannot go on; from any thread.

        Args:
            error: why.
            view: a view that it is in, and has no links of.
        """
        for mesh in (self.coming, self.mesh):
            if mesh is not None:
                mesh.fault.broke(error)
        if view is not None:
            unlinked = Fault(view.generation, view.rank, 0.0)
            unlinked.on_suspicion(functools.partial(self._report, view.generation))
            unlinked.broke(error)

    def coordinator_away(self) -> None:
        """The coordinator is out of reach: if that lasts, nobody waits for its verdict on what this member has seen."""
        self._away = True
        self._thread.loop.call_later(self._patience, self._expect_no_verdict)

    def coordinator_gone(self) -> None:
        """The coordinator does not come back: nobody waits for a verdict, now or later."""
        self._patience = 0.0
        self.coordinator_away()

    def _expect_no_verdict(self) -> None:
        if self._away and self.mesh is not None:
            self.mesh.fault.expect_no_verdict()

    def report_again(self) -> None:
        """A report that has had no answer goes out again: it may have been lost with the old stream."""
        self._away = False
        if self.mesh is not None and self.mesh.fault.verdict is None and self._reported is not None:
            self.control.send(self._reported)

    async def end(self) -> None:
        """Ends all links."""
        for mesh in (self.coming, self.mesh):
            if mesh is not None:
                await mesh.end()

    def _report(self, generation: int, suspicion: Suspicion) -> None:
        """Tells the coordinator; from any thread."""
        if suspicion.relayed or generation != self.control.generation:
            return
        report = pb.Report(
            generation=generation,
            operation=suspicion.operation,
            reason=suspicion.reason,
            accused=suspicion.accused,
            text=suspicion.text[:2000],
        )
        request = self._reported = pb.SessionRequest(report=report)

        def send() -> None:
            if generation == self.control.generation:  # else the session has become a new one, which was never in it
                self.control.send(request)
            if self._away:
                self.coordinator_away()

        self._thread.loop.call_soon_threadsafe(send)
