"""The mesh of links of one member in one generation, and the dialling side of each link.

Each side dials the gRPC stream that it writes: it says Hello at the peer's door, opens the half that carries the
frames, and writes the frames in the link's outbox. It reads the stream's answers all the time, so even an unused link
detects its peer's death within milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline._base.addresses import is_exhausted, is_refused, parse_endpoint
from paceline._base.rpc import (
    EOF,
    aio,
    channel_options,
    error_from_status,
    grpc,
    is_leaving,
    is_other_version,
    is_transient,
    untyped,
)
from paceline._base.waits import LoopThread
from paceline._links.base import Link, LinkEnded, Mesh, Peer, Purpose
from paceline._links.fault import MAX_TEXT, Fault, Suspicion
from paceline._links.frame import Frame, FrameKind, encode
from paceline._links.grpc_knock import process_runs
from paceline._links.kind import ProtocolError
from paceline._links.member_link import MemberLink
from paceline._links.registry import LinkKinds, Openings
from paceline.credentials import Credentials
from paceline.errors import LinkUnavailable, SessionClosed
from paceline_protocol import Verdict
from pacelinepb.v1 import peer_pb2, session_pb2
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.links")

_Key: TypeAlias = tuple[int, Purpose, str]  # rank, purpose, group

MAX_EARLY_GROUPS = 256
"""Groups that a peer has opened links for and this member has not. It may be late, but their memory is bounded."""

_RETRY = 0.05
"""Seconds between attempts at a door that did not answer."""

_KNOCK = 1.0
"""Seconds for a peer's host to say that no process listens there."""

_DYING = 0.5
"""Seconds in which a process that dies closes its door, after its streams. A writer waits for as long."""

_WITNESS_S = 0.05
"""Seconds before a breach of the protocol is passed on. Peers that see it themselves are witnesses; those that hear of
it stop before they have seen anything. Half of the time within which a failure wakes every call (I7)."""

_ABORT_GRACE = 0.2
"""Seconds for the ABORT frames of a failed generation to be written before its links are closed."""


class GrpcMesh(Mesh):
    """Links over PeerService streams: each side dials the stream that it writes.

    A pair has two streams, one for each direction. So the two members need not agree on who dials, and each direction
    has a connection of its own.

    Its members speak `version` of the protocol. It retries for `patience` seconds at a door that does not answer before
    its member counts as lost, unless its process runs.
    """

    def __init__(
        self,
        job: str,
        generation: int,
        version: int,
        rank: int,
        peers: Sequence[Peer],
        fault: Fault,
        thread: LoopThread,
        patience: float,
        credentials: Credentials,
        kinds: LinkKinds,
        *,
        max_early_groups: int = MAX_EARLY_GROUPS,
    ) -> None:
        self.generation = generation
        self.version = version
        self.rank = rank
        self.peers = tuple(peers)
        self.fault = fault
        self.member_id = self.peers[rank].member_id
        self._job = job
        self._thread = thread
        self._patience = patience
        self._credentials = credentials
        self.node = self.peers[rank].node
        self._kinds = kinds
        self._max_early_groups = max_early_groups
        self._openings = kinds.openings(self.node, self.neighbours, fault)
        self._by_id = {peer.member_id: peer for peer in self.peers}
        self._lock = threading.Lock()
        self._links: dict[_Key, MemberLink] = {}
        self._closed_groups: set[str] = set()
        self._sent_by_closed: Counter[str] = Counter()
        self._dialled: set[MemberLink] = set()
        self._channels: dict[int, aio.Channel] = {}  # touched on the loop only
        self._tasks: set[asyncio.Task[None]] = set()  # touched on the loop only
        self._leavers: set[int] = set()  # touched on the loop only
        self._closed = False  # no new links
        self._ended = False  # no links at all
        self._retired = False  # the next generation has come, so ends of links prove nothing
        self._held_back = b""  # the word of a breach that peers shall see for themselves first
        fault.on_suspicion(self._pass_on)
        if self.size > 1:  # opens and watches the link to the ring's next member before an operation asks for it
            self._dial(self._get((rank + 1) % self.size, Purpose.COLLECTIVE, ""), Purpose.COLLECTIVE, "", asked=False)

    def link(self, peer: int, purpose: Purpose, group: str = "") -> Link:
        """See `Mesh.link`."""
        if self._closed:
            raise SessionClosed("the links are closed: the session has ended")
        if group in self._closed_groups:
            raise SessionClosed("this member has closed the group")
        link = self._get(peer, purpose, group)
        self._dial(link, purpose, group, asked=True)
        return link

    def linked(self, purpose: Purpose, group: str = "") -> list[int]:
        """See `Mesh.linked`."""
        with self._lock:
            return sorted(rank for rank, *of in self._links if of == [purpose, group])

    def close_group(self, group: str, deadline: float) -> None:
        """See `Mesh.close_group`. Waits until the peers confirm that they have received all frames."""
        with self._lock:
            self._closed_groups.add(group)  # names are used once; a late Hello must not reopen it
            ours = [link for key, link in self._links.items() if key[2] == group]
            links = [link for link in ours if link in self._dialled]
        for link in ours:
            link.end_in(LinkEnded("this member has closed the group", orderly=True))
        for link in links:
            link.half_close(FrameKind.CLOSE, deadline)
        for link in links:
            link.close(deadline)
        with self._lock:
            for key in [key for key in self._links if key[2] == group]:
                link = self._links.pop(key)
                self._dialled.discard(link)
                self._sent_by_closed[link.kind] += link.sent_bytes
                link.forget()
                link.shut()

    def close(self, deadline: float) -> None:
        """See `Mesh.close`."""
        self._send_held_back()  # before LEAVE: a peer that hears only that would take this member for lost
        with self._lock:
            self._closed = True
            links = list(self._dialled)
        for link in links:
            link.half_close(FrameKind.LEAVE, deadline)
        for link in links:
            link.close(deadline)
        if self.fault.failed:  # lets the others hear of it before the links break
            grace = time.monotonic() + _ABORT_GRACE
            for link in links:
                link.stream.wait_empty(grace)
        text = "the session has ended: this member left"
        self.fault.settle(Verdict(self.generation, ErrorReason.ERROR_REASON_SESSION_ENDED, (), 0, text))
        self._thread.run(self.end())

    @property
    def encrypted(self) -> bool:
        """True if members have certificates (`Mesh.encrypted`)."""
        return self._credentials.ca is not None

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames sent so far, with their headers (`Mesh.bytes_sent`)."""
        return sum(self.sent_bytes.values())

    @property
    def sent_bytes(self) -> dict[str, int]:
        """The same by kind of link (`Mesh.sent_bytes`)."""
        with self._lock:
            sums, links = self._sent_by_closed.copy(), list(self._links.values())
        for link in links:
            if size := link.sent_bytes:
                sums[link.kind] += size
        return sums

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Returns an array that the links can lend (`Mesh.empty`)."""
        return self._kinds.empty(shape, dtype)

    def peer_by_id(self, member_id: str) -> Peer | None:
        """Returns the member with this id; None if it is not in this generation."""
        return self._by_id.get(member_id)

    def link_from(self, rank: int, purpose: Purpose, group: str) -> MemberLink | None:
        """Returns the link that receives from that rank; None if the rank has opened too many groups."""
        with self._lock:
            if self._ended or group in self._closed_groups:
                unread = MemberLink(self.peers[rank], self.fault, self._thread.loop)
                unread.forget()
                unread.shut()  # what still arrives is not read
                return unread
            early = {key[2] for key, link in self._links.items() if key[0] == rank and link not in self._dialled}
            if group not in early and len(early) >= self._max_early_groups:
                return None
        return self._get(rank, purpose, group)

    def peer_leaves(self, rank: int) -> None:
        """Records that a rank leaves in good order, so that its closed door is no evidence of its death."""
        self._leavers.add(rank)

    def peer_ended(self, rank: int, error: LinkEnded, *, evidence: bool = True) -> None:
        """Handles the end of a link to or from a rank: in order, the rank has left; otherwise it may be dead.

        Without `evidence` it may have left in good order all the same: only an operation that needs it reports it.
        """
        if self._closed or self._retired or self.fault.failed:
            return
        if error.orderly or not evidence:
            with self._lock:
                links = [link for (peer, *_), link in self._links.items() if peer == rank]
            for link in links:
                link.end_out(error)
                link.end_in(error)
        else:
            reason = ErrorReason.ERROR_REASON_VERSION if error.version else ErrorReason.ERROR_REASON_PEER_LOST
            self.fault.suspect(Suspicion(reason, rank, 0, str(error), unopened=error.unopened))

    def _get(self, rank: int, purpose: Purpose, group: str) -> MemberLink:
        with self._lock:
            link = self._links.get((rank, purpose, group))
            if link is None:
                link = MemberLink(self.peers[rank], self.fault, self._thread.loop)
                self._links[rank, purpose, group] = link
            return link

    def _dial(self, link: MemberLink, purpose: Purpose, group: str, *, asked: bool) -> None:
        """Dials a link once. `asked`: an operation asks for it."""
        with self._lock:
            new = link not in self._dialled
            self._dialled.add(link)
            link.asked = link.asked or asked
        if new:
            self._thread.loop.call_soon_threadsafe(self._start, link, purpose, group)

    def _start(self, link: MemberLink, purpose: Purpose, group: str) -> None:
        if self._ended:
            link.drained.set()
            return
        task = asyncio.ensure_future(self._serve(link, purpose, group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, link: MemberLink, purpose: Purpose, group: str) -> None:
        rank = link.peer.rank
        if rank not in self._channels:
            # grpc shares connections among channels with equal options. Our address makes them differ: a connection
            # from an earlier address of this worker must not be used.
            options = [*channel_options(self._patience), ("paceline.from", self.peers[self.rank].address)]
            self._channels[rank] = self._credentials.member_channel(link.peer.address, options)
        hello = peer_pb2.HelloRequest(
            protocol_version=self.version,
            job=self._job,
            from_member=self.member_id,
            to_member=link.peer.member_id,
            generation=self.generation,
            purpose=peer_pb2.Purpose.ValueType(purpose),
            group=group,
        )
        try:
            channel = self._channels[rank]
            ended = await dial(link, channel, hello, self._openings, self._patience, self._credentials)
        except Exception as error:  # noqa: BLE001  logged, and ends the generation: a link must not fail silently
            if is_exhausted(error):  # not the peer's failure; the training thread raises it
                self.fault.broke(error)
            else:
                _log.exception("the link to %s failed unexpectedly", link.peer)
            ended = LinkEnded(f"the link to {link.peer} failed: {error}")
        if rank in self._leavers:
            ended = LinkEnded(f"{link.peer} left", orderly=True)
        with self._lock:
            forgotten = not (link.asked or link.opened or self._closed)
            if forgotten:  # no evidence, since no operation needs the link; the first that does dials again
                self._dialled.discard(link)
        if forgotten:
            _log.info("no operation has asked for the link that did not open: %s", ended)
            return
        link.drained.set()
        if not (ended.orderly and group and link.closing):  # a member that leaves a group is not lost
            self.peer_ended(rank, ended, evidence=not (ended.unopened and link.opened))

    def _pass_on(self, suspicion: Suspicion) -> None:
        """Sends the first suspicion to the peers, so that they stop without the coordinator too."""
        if suspicion is not self.fault.first:
            return
        accused = self.rank if suspicion.accused is None else suspicion.accused
        word = session_pb2.Verdict(
            generation=self.generation,
            reason=suspicion.reason,
            culprits=[accused],
            operation=suspicion.operation,
            text=suspicion.text[:MAX_TEXT],
        )
        data = encode(Frame(FrameKind.ABORT, self.generation, suspicion.operation, 0, b"", word.SerializeToString()))
        if suspicion.reason == ErrorReason.ERROR_REASON_PEER_BROKE_PROTOCOL and not suspicion.relayed:
            self._held_back = data
            loop = self._thread.loop
            loop.call_soon_threadsafe(loop.call_later, _WITNESS_S, self._send_held_back)
        else:
            self._send_last(data)

    def _send_held_back(self) -> None:
        """Sends the word of a breach that was held back, if it was not sent yet."""
        with self._lock:
            data, self._held_back = self._held_back, b""
        if data:
            self._send_last(data)

    def _send_last(self, data: bytes) -> None:
        with self._lock:
            links = list(self._dialled)
        for link in links:
            link.stream.put_last(data)

    def retire(self) -> None:
        """Records that the next generation has come, so that peers may drop these links at any time."""
        self._retired = True

    async def end(self) -> None:
        """Drops every link at once. Runs on the loop. Idempotent."""
        self._closed = self._ended = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.forget()
            link.shut()


async def dial(
    link: MemberLink,
    channel: aio.Channel,
    hello: peer_pb2.HelloRequest,
    openings: Openings,
    patience: float,
    credentials: Credentials,
) -> LinkEnded:
    """Opens a link's outgoing half and its stream, serves the stream until it ends, and returns how the link ended.

    A peer that is gone before the stream has opened is no failure by itself: it may have left in good order. Then the
    end is orderly, and an operation that needs the peer fails.

    This fills in the kinds that `hello` offers. It retries for `patience` seconds while the door does not answer; for
    longer, if the peer's process runs.
    """
    runs = partial(process_runs, link.peer.address, credentials)
    try:
        answer = await _open(link, channel, hello, openings, patience, runs)
    except LinkEnded as error:
        return error
    frames = untyped(channel.stream_stream)(
        "/pacelinepb.v1.PeerService/Frames", response_deserializer=peer_pb2.FramesResponse.FromString
    )
    call = frames(metadata=aio.Metadata(("paceline-ticket-bin", answer.ticket)))
    watcher = asyncio.create_task(_watch(link, call))
    minder = asyncio.create_task(_mind(link, patience))
    try:
        # A write fails once the stream has ended; the watcher says how it ended. `done_writing` raises InternalError.
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError, aio.InternalError):
            while (data := await link.stream.take()) is not None:
                await call.write(data)
            await call.done_writing()
        done, _ = await asyncio.wait((watcher, minder), return_when=asyncio.FIRST_COMPLETED)
        return (minder if minder in done else watcher).result()
    finally:
        minder.cancel()
        watcher.cancel()
        call.cancel()


async def _open(
    link: MemberLink,
    channel: aio.Channel,
    hello: peer_pb2.HelloRequest,
    openings: Openings,
    patience: float,
    runs: Callable[[], Awaitable[bool]],
) -> peer_pb2.HelloResponse:
    """Agrees with the peer's door on a kind and opens a half. Does not offer again a kind that cannot be opened."""
    while True:
        openings.offer(link.peer, hello)
        answer = await _say_hello(link, channel, hello, patience, runs)
        if answer.chosen not in hello.offered:
            raise ProtocolError(f"{link.peer} broke the protocol: it chose a kind of link that was not offered")
        try:
            link.send_by(await openings.open(answer, link.peer, link.stream))
        except LinkUnavailable as error:
            _log.info("trying another kind of link to %s: %s", link.peer, error)
            openings.give_up(link.peer, answer.chosen)
        else:
            return answer


async def _say_hello(
    link: MemberLink,
    channel: aio.Channel,
    hello: peer_pb2.HelloRequest,
    patience: float,
    runs: Callable[[], Awaitable[bool]],
) -> peer_pb2.HelloResponse:
    """Says Hello until the door answers. Operations wait for it with deadlines of their own."""
    method = channel.unary_unary(
        "/pacelinepb.v1.PeerService/Hello",
        request_serializer=peer_pb2.HelloRequest.SerializeToString,
        response_deserializer=peer_pb2.HelloResponse.FromString,
    )
    start = time.monotonic()
    while True:
        try:
            answer: peer_pb2.HelloResponse = await method(hello, timeout=patience)
            return answer
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and await runs():
                start = time.monotonic()  # its interpreter is busy, or it has yet to hear of the view
                continue
            waited = time.monotonic() - start
            refused = is_transient(error) and await is_refused(parse_endpoint(link.peer.address), _KNOCK)
            if refused or not is_transient(error) or waited > patience:
                typed = error_from_status(error, f"{link.peer} at {link.peer.address}")
                why = "its address refuses connections" if refused else f"its door does not open: {typed}"
                text = f"{link.peer}: {why} (tried {waited:.1f} s)"
                raise LinkEnded(text, orderly=refused, unopened=True, version=is_other_version(error)) from error
        await asyncio.sleep(_RETRY)


async def _watch(link: MemberLink, call: aio.StreamStreamCall[bytes, peer_pb2.FramesResponse]) -> LinkEnded:
    ended = LinkEnded(f"the link to {link.peer} ended")
    try:
        ended = await _end_of(link, call)
    finally:
        link.end_out(ended)  # the writer may wait for a frame that the peer will not take any more
    return ended


async def _mind(link: MemberLink, patience: float) -> LinkEnded:
    """Returns when the connection that carries the frames is dead, although the stream is alive.

    This happens if a device between the two hosts has forgotten that connection.
    """
    while (stuck := link.stuck_for(time.monotonic())) <= patience:  # noqa: ASYNC110  the kernel does not notify
        await asyncio.sleep(patience / 6)
    ended = LinkEnded(
        f"the {link.kind} link to {link.peer} is cut: the host of that rank has acknowledged nothing for {stuck:.1f} s"
    )
    link.end_out(ended)
    return ended


async def _end_of(link: MemberLink, call: aio.StreamStreamCall[bytes, peer_pb2.FramesResponse]) -> LinkEnded:
    accepted = False
    try:
        while (answer := await call.read()) is not EOF:
            assert isinstance(answer, peer_pb2.FramesResponse)
            accepted = accepted or answer.HasField("accepted")
            if answer.HasField("drained"):
                link.drained.set()
                return LinkEnded(f"{link.peer} left", orderly=True)
    except aio.AioRpcError as error:
        if not accepted and await _is_gone(link, error):
            return LinkEnded(f"{link.peer} ended before the link to it had opened", unopened=True)
        return LinkEnded(f"the link to {link.peer} ended: {error_from_status(error, 'frames')}")
    return LinkEnded(f"the link to {link.peer} ended")


async def _is_gone(link: MemberLink, error: aio.AioRpcError) -> bool:
    """True if the peer was leaving, or had ended, when a stream came to its door."""
    start = time.monotonic()
    while is_transient(error):
        if is_leaving(error) or await is_refused(parse_endpoint(link.peer.address), _KNOCK):
            return True
        if time.monotonic() - start > _DYING:
            break
        await asyncio.sleep(_RETRY)
    return False
