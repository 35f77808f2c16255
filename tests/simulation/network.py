"""Who reaches whom, and the streams between members and the coordinator.

Cuts go one way or both. A stream is first in, first out, each way, with random delays. While its sender cannot reach
its receiver it holds what was sent (TCP would send it again); a reset loses what is under way, and each end hears of it
in its own time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from paceline._base.rpc import EOF, aio, grpc
from paceline_server.errors import STATUS, NotLeader, Refused
from pacelinepb import ERROR_DOMAIN
from pacelinepb.v1.errors_pb2 import ErrorReason

if TYPE_CHECKING:
    from simulation.coordinator import Coordinator
    from simulation.process import Process
    from simulation.world import World

__all__ = ["COORDINATOR", "Network", "Stream", "refusal", "unavailable"]

COORDINATOR = "K"


class Network:
    """The cuts between hosts, by name: from one to the other."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cuts: dict[tuple[str, str], int] = {}
        self.streams: list[Stream] = []

    def gets_through(self, one: str, other: str) -> bool:
        """True if what the one sends comes to the other."""
        return not self._cuts or (one, other) not in self._cuts

    def reaches(self, one: str, other: str) -> bool:
        """True if nothing separates the two."""
        return not self._cuts or ((one, other) not in self._cuts and (other, one) not in self._cuts)

    def cut(self, pairs: list[tuple[str, str]], seconds: float, *, one_way: bool = False) -> None:
        """Separates pairs for a while."""
        ways = [*pairs] if one_way else [*pairs, *((other, one) for one, other in pairs)]
        for way in ways:
            self._cuts[way] = self._cuts.get(way, 0) + 1
        self._world.clock.after(seconds, self._heal, ways)

    def _heal(self, ways: list[tuple[str, str]]) -> None:
        for way in ways:
            self._cuts[way] -= 1
            if not self._cuts[way]:
                del self._cuts[way]
        self._world.note("net", f"{' '.join('-'.join(way) for way in ways)} heal")
        self.streams = [stream for stream in self.streams if stream.open]
        for stream in self.streams:
            stream.flush()


def refusal(refused: Refused) -> aio.AioRpcError:
    """What a caller gets whom the coordinator refuses; as `services.refusals` makes it."""
    detail = AnyMessage()
    reason = ErrorReason.Name(refused.reason).removeprefix("ERROR_REASON_")
    info = ErrorInfo(reason=reason, domain=ERROR_DOMAIN)
    if isinstance(refused, NotLeader):
        info.metadata["leader"] = refused.leader
    detail.Pack(info)
    code, text = STATUS[type(refused)], str(refused)
    status = Status(code=code.value[0], message=text, details=[detail])
    trailing = aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return aio.AioRpcError(code, aio.Metadata(), trailing, text, None)


def unavailable(text: str) -> aio.AioRpcError:
    """What a caller gets where nobody answers."""
    return aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), text, None)


class _Inbox:
    """What has come to one end of a stream, and its end."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._end: BaseException | None = None
        self._ended = False
        self._ready: asyncio.Future[None] | None = None

    def put(self, message: Any) -> None:
        if not self._ended:
            self._messages.append(message)
            self._wake()

    def end(self, error: BaseException | None) -> None:
        """`error`: raised once all is read; None for an end in good order."""
        if not self._ended:
            self._ended, self._end = True, error
            self._wake()

    async def read(self) -> Any:
        while not self._messages and not self._ended:
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready
        if self._messages:
            return self._messages.popleft()
        if self._end is not None:
            raise self._end
        return EOF

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)


class Stream:
    """One session's stream; as the client sees it, a `StreamStreamCall`.

    Args:
        world: where.
        process: whose end it is.
        coordinator: the other end.
    """

    def __init__(self, world: World, process: Process, coordinator: Coordinator) -> None:
        self._world = world
        self.process = process
        self.coordinator = coordinator
        self.open = True
        self.member_id = ""
        self.inbox = _Inbox()
        self._last = [0.0, 0.0]
        self._sent, self._due = [0, 0], [0, 0]
        self._early: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self._held: tuple[list[Any], list[Any]] = ([], [])
        self._life = coordinator.life
        self._arrived = False
        self.context: Context | None = None
        world.network.streams.append(self)

    # The client's end.

    async def write(self, message: Any) -> None:
        """Sends to the coordinator."""
        if not self.open:
            raise unavailable("the stream is no more")
        if message.HasField("meet"):
            self.process.met(message.meet)
        self.send(0, message)

    async def read(self) -> Any:
        """The next message; None at the end."""
        message = await self.inbox.read()
        return None if message is EOF else message

    def cancel(self) -> None:
        """The client gives it up: what it has sent arrives first."""
        if self.open:
            self.send(0, EOF)

    # The wire.

    def send(self, way: int, message: Any) -> None:
        """Up (0) or down (1)."""
        if self.open:
            self._set_out(way, self._sent[way], message)
            self._sent[way] += 1

    def _set_out(self, way: int, number: int, message: Any) -> None:
        self._last[way] = max(self._last[way], self._world.clock.now + self._world.latency())
        self._world.clock.at(self._last[way], self._arrive, way, number, message)

    def reset(self) -> None:
        """The stream breaks."""
        if self.open:
            self.open = False
            delay, clock = self._world.delay, self._world.clock
            if self.context is not None:
                clock.after(delay(0.001, 0.05), self.coordinator.hear, self._life, self.context.end)
            error = unavailable("the connection is lost")
            clock.after(delay(0.001, 0.05), self.process.hear, self.inbox.end, error)

    def finish(self, error: BaseException | None) -> None:
        """The coordinator ends it, once all that it has sent has arrived."""
        self.send(1, _End(error))

    def flush(self) -> None:
        """Delivers what was held, as far as it gets through again."""
        for way in (0, 1):
            if self._gets_through(way):
                held, self._held[way][:] = list(self._held[way]), []
                for number, message in held:
                    self._set_out(way, number, message)

    def _gets_through(self, way: int) -> bool:
        ends = (self.process.name, self.coordinator.name)
        return self._world.network.gets_through(ends[way], ends[1 - way])

    def _arrive(self, way: int, number: int, message: Any) -> None:
        if self._held[way] or not self._gets_through(way):
            self._held[way].append((number, message))
            return
        early = self._early[way]
        early[number] = message  # what was held and is sent again comes first
        while self.open and self._due[way] in early:
            self._due[way] += 1
            self._deliver(way, early.pop(self._due[way] - 1))

    def _deliver(self, way: int, message: Any) -> None:
        if way == 0:
            self.coordinator.hear(self._life, self._take_up, message)
        elif isinstance(message, _End):
            self.open = False
            self.process.hear(self.inbox.end, message.error)
        else:
            self.process.hear(self.inbox.put, message)

    def _take_up(self, message: Any) -> None:
        if self.context is None:
            if message is EOF:
                return
            self.context = Context(self)
            self.coordinator.serve(self.context)
        if message is EOF:
            self.open = False
            self.context.end()
            self.process.hear(self.inbox.end, None)
        else:
            self.context.inbox.put(message)


class _End:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Context:
    """The coordinator's end of a stream: what `SessionHandlers.session` reads from and writes to."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.inbox = _Inbox()
        self.task: asyncio.Task[None] | None = None

    async def read(self) -> Any:
        """The next message; EOF at the end."""
        return await self.inbox.read()

    async def write(self, message: Any) -> None:
        """Sends to the member."""
        if message.HasField("registered"):
            self.stream.member_id = message.registered.member_id
        self.stream.send(1, message)

    def end(self) -> None:
        """The member's end is no more."""
        self.inbox.end(None)
        if self.task is not None:
            self.task.cancel()
