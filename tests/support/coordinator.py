"""What tests and benchmarks of the coordinator share.

`PureJob`: the decisions about one job without a socket, with a clock that the test moves. `RawSession`: sessions on raw
grpc.aio stubs, as a worker would hold them; nothing of the client is used, so that the two sides are tested against the
protocol and not against each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from paceline_protocol import OURS, JobSettings, Process, Progress, Report, Versions
from paceline_protocol.coordinator import (
    BarrierEntered,
    Effect,
    Event,
    FinishStored,
    Heard,
    JobState,
    Launch,
    LeftJob,
    Membership,
    Registered,
    Reported,
    Resumed,
    Send,
    StoreFinished,
    StoreView,
    StreamEnded,
    Ticked,
    ViewStored,
)
from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import EOF, aio
from paceline_server.dispatcher import Observer
from paceline_server.services.admin import AdminLimits
from paceline_server.services.probes import Probes
from paceline_server.storage.base import Storage
from pacelinepb import ERROR_DOMAIN, checks
from pacelinepb.v1 import session_pb2 as pb
from pacelinepb.v1 import store_pb2
from pacelinepb.v1.session_pb2_grpc import SessionServiceStub

__all__ = ["PureJob", "RawSession", "duration", "reason_of", "refused", "run", "running", "sent"]

T = TypeVar("T")

PATIENCE = 10.0
"""Seconds after which a test that waits for a message gives up."""


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs an asynchronous test to its end, but not for ever."""

    async def bounded() -> T:
        async with asyncio.timeout(5 * PATIENCE):
            return await main()

    return asyncio.run(bounded())


@asynccontextmanager
async def running(
    storage: Storage | None = None,
    observer: Observer | None = None,
    *,
    probes: Probes | None = None,
    admin_limits: AdminLimits | None = None,
    **settings: Any,
) -> AsyncIterator[aio.Channel]:
    """A coordinator on a free port and a channel to it; both are closed at the end."""
    settings.setdefault("listen", "127.0.0.1:0")
    coordinator = Coordinator(
        ServerSettings(**settings), storage=storage, observer=observer, probes=probes, admin_limits=admin_limits
    )
    address = await coordinator.start()
    try:
        async with aio.insecure_channel(address) as channel:
            yield channel
    finally:
        await coordinator.stop(grace=0.2)


def duration(seconds: float) -> Duration:
    """Seconds as a message."""
    return Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))


def reason_of(error: aio.AioRpcError) -> str:
    """The `reason` of the ErrorInfo that came with a refusal."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no details came with {error!r}"
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == ERROR_DOMAIN
    return info.reason


async def refused(session: RawSession) -> aio.AioRpcError:
    """Reads to the end of a session's stream and returns how it was refused."""
    try:
        while True:
            await session.read()
    except aio.AioRpcError as error:
        return error


class RawSession:
    """One open session stream.

    Attributes:
        place: of the next message that is sent, for its check.
    """

    def __init__(self, channel: aio.Channel, job: str, token: str = "") -> None:
        self.job = job
        self.stub: Any = SessionServiceStub(channel)
        self.place = 0
        self.call: Any = channel.stream_stream(
            "/pacelinepb.v1.SessionService/Session",
            request_serializer=self._serialized,
            response_deserializer=pb.SessionResponse.FromString,
        )(metadata=aio.Metadata(("authorization", f"Bearer {token}")) if token else None)
        self._writing = asyncio.Lock()
        self.member_id = ""
        self.token = self.door_secret = b""
        self.heartbeat_interval = 0.0

    @classmethod
    async def register(
        cls,
        channel: aio.Channel,
        job: str = "job",
        *,
        least: int = 2,
        most: int = 2,
        failure_timeout: float = 3.0,
        host: str = "host-a",
        pid: int = 1,
        token: str = "",
        replica_size: int = 1,
        **fields: Any,
    ) -> RawSession:
        """Registers and reads the answer."""
        session = cls(channel, job, token)
        settings = pb.JobSettings(
            min_workers=least,
            max_workers=most,
            failure_timeout=duration(failure_timeout),
            replica_size=replica_size,
        )
        fields = {
            "protocol_version": OURS.oldest,
            "newest_protocol_version": OURS.newest,
            "process": pb.ProcessIdentity(host=host, pid=pid),
            **fields,
        }
        register = pb.Register(
            job=job,
            address=f"{host}:{pid}",
            settings=settings,
            **fields,
        )
        await session.send(register=register)
        return await session._registered()

    @classmethod
    async def resume(cls, channel: aio.Channel, old: RawSession, generation: int, **fields: Any) -> RawSession:
        """Takes a session up again and reads the answer."""
        session = cls(channel, old.job)
        resume = pb.Resume(
            job=old.job,
            member_id=fields.get("member_id", old.member_id),
            session_token=fields.get("session_token", old.token),
            generation=generation,
            protocol_version=OURS.oldest,
            newest_protocol_version=OURS.newest,
        )
        await session.send(resume=resume)
        return await session._registered()

    def _serialized(self, message: pb.SessionRequest) -> bytes:
        self.place += 1
        return checks.with_check(message.SerializeToString(), self.place - 1)

    async def _registered(self) -> RawSession:
        answer = (await self.read()).registered
        self.member_id, self.token = answer.member_id, answer.session_token
        self.door_secret = answer.door_secret
        self.heartbeat_interval = answer.heartbeat_interval.seconds + answer.heartbeat_interval.nanos * 1e-9
        return self

    @property
    def caller(self) -> store_pb2.Caller:
        """Who asks, for the store."""
        return store_pb2.Caller(job=self.job, member_id=self.member_id, session_token=self.token)

    async def send(self, **event: Any) -> None:
        """Writes one message."""
        async with self._writing:  # gRPC takes one write at a time
            await self.call.write(pb.SessionRequest(**event))

    async def read(self) -> pb.SessionResponse:
        """Reads one message.

        Raises:
            EOFError: the stream ended in good order.
            AioRpcError: it was refused.
        """
        message = await self.call.read()
        if message is EOF:
            raise EOFError("the stream has ended")
        assert isinstance(message, pb.SessionResponse)
        if message.HasField("new_door_secret"):
            self.door_secret = message.new_door_secret.door_secret
            return await self.read()
        return message

    async def next(self, kind: str) -> Any:
        """The next message of a kind; `waiting` messages before it are skipped, anything else is an error."""
        async with asyncio.timeout(PATIENCE):
            while True:
                message = await self.read()
                found = message.WhichOneof("event")
                if found == kind:
                    return getattr(message, kind)
                assert found in ("waiting", "alive"), f"wanted {kind}, got {message}"

    async def view(self) -> pb.ViewFormed:
        """Waits for the view."""
        formed: pb.ViewFormed = await self.next("view_formed")
        return formed

    async def get_pages(self, view: pb.ViewFormed, position: int = 0) -> bytes:
        """All pages of the view's members, concatenated as they are hashed."""
        pages = [
            await self.stub.GetView(
                pb.GetViewRequest(job=self.job, generation=view.generation, page=number, position=position)
            )
            for number in range(view.pages)
        ]
        return b"".join(page.SerializeToString(deterministic=True) for page in pages)

    async def heartbeat(self, **progress: Any) -> None:
        """Sends a sign of life."""
        await self.send(heartbeat=pb.Heartbeat(**progress))

    async def enter_barrier(self, name: str, round_: int = 0, timeout: float = 30.0, **fields: Any) -> None:
        """Arrives at a barrier of generation 1, unless told otherwise."""
        fields.setdefault("generation", 1)
        entry = pb.EnterBarrier(call=round_, name=name, round=round_, timeout=duration(timeout), **fields)
        await self.send(enter_barrier=entry)

    async def barrier_passed(self) -> pb.BarrierPassed:
        """Waits for the barrier."""
        passed: pb.BarrierPassed = await self.next("barrier_passed")
        return passed

    async def report(self, reason: int, accused: int | None, text: str = "the link ended", **fields: Any) -> None:
        """Reports evidence about generation 1, unless told otherwise."""
        fields.setdefault("generation", 1)
        await self.send(report=pb.Report(reason=reason, accused=accused, text=text, **fields))  # type: ignore[arg-type]

    async def leave(self, cause: str = "") -> None:
        """Leaves and waits for the end of the stream."""
        await self.send(leave=pb.Leave(cause=cause))
        await self.next("left")
        assert await self.call.read() is EOF


M = TypeVar("M")


def sent(effects: Iterable[object], kind: type[M]) -> list[tuple[str, M]]:
    """The messages of one kind among effects, each with its receiver."""
    return [
        (effect.member_id, effect.message)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, kind)
    ]


class PureJob:
    """One job's membership under a clock that only the test moves.

    Members are named "m1", "m2", ... in the order of their arrival, on hosts "host-1", "host-2", ... unless told
    otherwise. Views are stored at once unless `slow_disk` is set.
    """

    def __init__(self, state: JobState | None = None, **settings: Any) -> None:
        self.now = 100.0
        self.membership = Membership(state or JobState("job"), ServerSettings(**settings))
        self.slow_disk = False
        self.effects: list[Effect] = []
        self._count = len(self.state.sessions)

    @property
    def state(self) -> JobState:
        """The job's state."""
        return self.membership.state

    @property
    def reason(self) -> str:
        """The policy's sentence."""
        return self.membership.decision.reason

    def do(self, event: Event) -> list[Effect]:
        """Gives an event and returns its effects, with those of storing a view."""
        effects = self.membership.handle(self.now, event)
        for effect in list(effects):
            if isinstance(effect, StoreView) and not self.slow_disk:
                effects += self.do(ViewStored(effect.view.generation))
            elif isinstance(effect, StoreFinished) and effect.step is not None and not self.slow_disk:
                effects += self.do(FinishStored(effect.step))
        self.effects = effects
        return effects

    def join(
        self,
        least: int = 2,
        most: int = 2,
        *,
        rank: int | None = None,
        host: str | None = None,
        timeout: float = 3.0,
        floor: int = 0,
        address: str | None = None,
        boot_id: str = "",
        former: str = "",
        former_token: bytes | None = None,
        tuning: str = "",
        versions: Versions = OURS,
        pid: int | None = None,
        replica: str = "",
        position: int = 0,
        size: int = 1,
        launch: Launch | None = None,
    ) -> str:
        """A worker registers; returns its member id. `effects` has what followed.

        With a `replica` it is the rank at `position` of that replica, which has `size` ranks.
        """
        self._count += 1
        number = self._count
        event = Registered(
            member_id=f"m{number}",
            token_sha256=b"token-%d" % number,
            stream=number,
            process=Process(host or f"host-{number}", pid or 1000 + number, boot_id),
            address=address or f"host-{number}:1",
            settings=JobSettings(least, most, timeout, tuning, size),
            claimed_rank=rank,
            generation_floor=floor,
            versions=versions,
            former_member_id=former,
            former_token_sha256=former_token or b"token-" + former[1:].encode(),
            replica=replica,
            position=position,
            launch=launch,
        )
        self.do(event)
        return event.member_id

    def form(self, world: int) -> list[str]:
        """A view of so many members forms; returns their ids by rank."""
        members = [self.join(world, world) for _ in range(world)]
        assert self.state.live is not None
        return members

    def pass_time(self, seconds: float, beating: list[str] | None = None, slept: float = 0.0) -> list[Effect]:
        """Moves the clock; those who beat are heard before anything is judged. Looks twice, as lapses ask for."""
        self.now += seconds
        for member_id in beating or []:
            self.do(Heard(member_id, self.state.sessions[member_id].progress))
        effects = self.do(Ticked(slept))
        self.now += 0.02
        return effects + self.do(Ticked())

    def becomes(self, member_id: str, process: Process) -> None:
        """The member has been another process from the start."""
        session = self.state.sessions[member_id]
        del self.state.sessions[member_id]
        session.process = process
        self.state.sessions[member_id] = session

    def cut(self, member_id: str) -> list[Effect]:
        """The member's stream ends."""
        stream = self.state.sessions[member_id].stream
        assert stream is not None
        return self.do(StreamEnded(member_id, stream))

    def resume(
        self,
        member_id: str,
        generation: int,
        token: bytes | None = None,
        stream: int = 99,
        versions: Versions = OURS,
    ) -> list[Effect]:
        """The member comes back."""
        return self.do(Resumed(member_id, token or b"token-" + member_id[1:].encode(), stream, generation, versions))

    def report(
        self, member_id: str, reason: int, accused: int | None, text: str = "the link ended", operation: int = 7
    ) -> list[Effect]:
        """The member reports evidence about the current generation."""
        report = Report(-1, reason, accused, operation, text)  # type: ignore[arg-type]
        return self.do(Reported(member_id, self.state.generation, report))

    def leave(self, member_id: str, cause: str = "") -> list[Effect]:
        """The member leaves."""
        return self.do(LeftJob(member_id, cause))

    def beat(self, member_id: str, operation: int, ago: float = 0.0, inside: bool = False) -> None:
        """The member says where it is."""
        self.do(Heard(member_id, Progress(operation, self.now - ago, inside)))

    def enter(
        self, member_id: str, name: str = "b", round_: int = 0, timeout: float = 30.0, call: int = 1
    ) -> list[Effect]:
        """The member arrives at a barrier of the current generation."""
        return self.do(BarrierEntered(member_id, call, self.state.generation, name, round_, timeout))
