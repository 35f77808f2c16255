"""The generations of a member: the present one of its group, the next one, and what ends each of them.

A verdict may arrive before the links of its generation exist, and a report may be lost with its stream. So a verdict is
kept until it is applied, and a report until it is answered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from paceline._base.waits import LoopThread
from paceline._links.base import Peer
from paceline._links.fault import Fault, Suspicion
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.nowhere import NoMesh
from paceline._links.registry import LinkKinds
from paceline._session.control import ControlStream
from paceline.config import Config
from paceline.credentials import Credentials
from paceline.errors import PacelineError, ReplicaLost
from paceline_protocol import Verdict
from paceline_protocol.messages import ViewFormed
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1.errors_pb2 import ErrorReason

_AWAY_S = 0.05
"""Seconds in which a stream that was reset opens again; a coordinator whose process died takes longer."""


class Generations:
    """The generations of one member.

    `control` is set once there is a stream. `mesh` has the links that the group uses, None until `join` has made them;
    `coming` has the links of a view to which the group has not moved yet.
    """

    control: ControlStream

    def __init__(
        self, job: str, config: Config, thread: LoopThread, credentials: Credentials, kinds: LinkKinds
    ) -> None:
        self.mesh: GrpcMesh | NoMesh | None = None
        self.coming: GrpcMesh | None = None
        self._job = job
        self._config = config
        self._thread = thread
        self._credentials = credentials
        self._kinds = kinds
        self._away = False
        self._patience = _AWAY_S
        self._early: Verdict | None = None  # the verdict on a view that is being adopted
        self._reported: pb.SessionRequest | None = None

    def move(self, mesh: GrpcMesh) -> None:
        """Moves the group to the links of the next generation; on the training thread."""
        self.mesh = mesh
        if self.coming is mesh:
            self.coming = None
        self._reported = None

    # On the loop.

    def formed(self, generation: int) -> None:
        """Ends the generation that the group is in, because a view has formed."""
        self._early = None
        if self.mesh is not None:
            self.mesh.retire()
            # Members that went on in the old generation while the coordinator was away stop in their step.
            self.outdate(f"generation {generation} has formed")

    def make(self, view: ViewFormed, peers: Sequence[Peer]) -> GrpcMesh:
        """Makes the links of a view."""
        fault = Fault(view.generation, view.rank, self._config.verdict_timeout, str(peers[view.rank]))
        fault.on_suspicion(functools.partial(self._report, view.generation))
        if self._early is not None and self._early.generation == view.generation:
            fault.settle(self._early)
        return GrpcMesh(
            self._job,
            view.generation,
            view.version,
            view.rank,
            peers,
            fault,
            self._thread,
            self._config.failure_timeout,
            self._credentials,
            self._kinds,
        )

    def settle(self, verdict: Verdict) -> bool:
        """Ends a generation. Returns False if its links do not exist yet; the verdict is kept for them."""
        for mesh in (self.coming, self.mesh):
            if mesh is not None and verdict.generation == mesh.generation:
                mesh.fault.settle(verdict)
                return True
        self._early = verdict
        return False

    def outdate(self, text: str) -> None:
        """Ends the generation that the group is in, if any; the session goes on in another one."""
        if self.mesh is not None:
            stale = ErrorReason.ERROR_REASON_STALE_GENERATION
            self.mesh.fault.settle(Verdict(self.mesh.generation, stale, (), 0, text))

    def session_ended(self, error: PacelineError) -> None:
        """Ends the generation that the group is in, if any, because the session has ended for good."""
        if self.mesh is not None:
            lost = isinstance(error, ReplicaLost)
            ended = ErrorReason.ERROR_REASON_REPLICA_LOST if lost else ErrorReason.ERROR_REASON_SESSION_ENDED
            self.mesh.fault.settle(Verdict(self.mesh.generation, ended, (self.mesh.rank,), 0, str(error)))

    def cut_off(self, text: str) -> None:
        """Breaks all links at this member's own side, without suspecting another member."""
        for mesh in (self.coming, self.mesh):
            if mesh is not None:
                stale = ErrorReason.ERROR_REASON_STALE_GENERATION
                mesh.fault.settle(Verdict(mesh.generation, stale, (mesh.rank,), 0, text))

    def broke(self, error: BaseException, view: ViewFormed | None = None) -> None:
        """Tells the others that this member cannot go on; from any thread. It has no links in `view`, if given."""
        for mesh in (self.coming, self.mesh):
            if mesh is not None:
                mesh.fault.broke(error)
        if view is not None:
            unlinked = Fault(view.generation, view.rank, 0.0)
            unlinked.on_suspicion(functools.partial(self._report, view.generation))
            unlinked.broke(error)

    def coordinator_away(self) -> None:
        """Notes that the coordinator is out of reach: if that lasts, failures no longer wait for its verdict."""
        self._away = True
        self._thread.loop.call_later(self._patience, self._expect_no_verdict)

    def coordinator_gone(self) -> None:
        """Notes that the coordinator will not come back: failures never wait for its verdict."""
        self._patience = 0.0
        self.coordinator_away()

    def _expect_no_verdict(self) -> None:
        if self._away and self.mesh is not None:
            self.mesh.fault.expect_no_verdict()

    def report_again(self) -> None:
        """Sends a report without an answer again, since it may have been lost with the old stream."""
        self._away = False
        if self.mesh is not None and self.mesh.fault.verdict is None and self._reported is not None:
            self.control.send(self._reported)

    async def end(self) -> None:
        """Ends all links."""
        for mesh in (self.coming, self.mesh):
            if mesh is not None:
                await mesh.end()

    def _report(self, generation: int, suspicion: Suspicion) -> None:
        """Reports a suspicion to the coordinator; from any thread.

        A member that was told by a peer shows that it lives: the coordinator must not take it for dead.
        """
        if suspicion.relayed:
            self._thread.loop.call_soon_threadsafe(self.control.beat)
            return
        if generation != self.control.generation:
            return
        report = pb.Report(
            generation=generation,
            operation=suspicion.operation,
            reason=suspicion.reason,
            accused=suspicion.accused,
            text=suspicion.text[:2000],
            unopened=suspicion.unopened,
        )
        request = self._reported = pb.SessionRequest(report=report)

        def send() -> None:
            if generation == self.control.generation:  # a new session has never been in that generation
                self.control.send(request)
            if self._away:
                self.coordinator_away()

        self._thread.loop.call_soon_threadsafe(send)
