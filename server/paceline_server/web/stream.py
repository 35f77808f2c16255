"""Server-sent events: what a job looks like, twice a second, built once for all who watch it.

Members that have not changed are left out of all messages but a viewer's first. A viewer that does not take what is
sent is cut off: it neither holds up the others nor fills the coordinator's memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from paceline_server.errors import Draining, NoRoom, Refused
from paceline_server.limits import Budget
from paceline_server.web.web_limits import USUAL, WebLimits

_log = logging.getLogger(__name__)

_COMMENT_S = 1.0
"""Seconds after which viewers get an empty comment, so that they know that the connection is alive."""

MOST_WAITING = 8
"""Messages that may wait for a viewer."""

_CHECK_S = 5.0
"""Seconds between two looks at whether a viewer's token still holds."""

Build = Callable[[], Awaitable[dict[str, Any]]]


class _Viewer:
    """One who watches."""

    def __init__(self, cut: Callable[[], None]) -> None:
        self.cut = cut
        self.is_new = True
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)


class Broadcast:
    """Messages about one thing to all who watch it.

    `build` returns the whole message, as JSON has it. `running` returns how many broadcasts there are. `built` is how
    often a message was built.
    """

    def __init__(
        self, event: str, build: Build, running: Callable[[], int] = lambda: 1, limits: WebLimits = USUAL
    ) -> None:
        self.built = 0
        self.viewers: set[_Viewer] = set()
        self._event = event.encode()
        self._build = build
        self._running = running
        self._limits = limits
        self._before: dict[str, Any] = {}
        self._first = b""  # the last message as a new viewer gets it, once one has
        self._task: asyncio.Task[None] | None = None

    def join(self, cut: Callable[[], None]) -> _Viewer:
        """Adds a viewer, which gets the last message at once; the messages begin with the first viewer."""
        viewer = _Viewer(cut)
        self.viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        elif self._before:
            self._greet(viewer)
        return viewer

    def leave(self, viewer: _Viewer) -> None:
        """Removes a viewer; the messages end with the last."""
        self.viewers.discard(viewer)
        if not self.viewers and self._task is not None:
            self._task.cancel()
            self._task = None  # one who joins before it has ended begins another

    def close(self, last: bytes | None = None) -> None:
        """Ends all streams in good order, after a last message that says all."""
        messages = [None] if last is None else [last, None]
        for viewer in self.viewers:
            while viewer.queue.qsize() > MOST_WAITING - len(messages):
                viewer.queue.get_nowait()
            for message in messages:
                viewer.queue.put_nowait(message)

    async def finish(self) -> None:
        """Ends all streams after a last whole message, built now and marked `over`: it shows how a job has ended."""
        if self._task is not None:
            self._task.cancel()
        try:
            last = self._message({**await self._build(), "over": True})
        except Exception:  # noqa: BLE001  without it they end as well: the coordinator stops
            last = None
        self.close(last)

    async def _run(self) -> None:
        while self.viewers:
            began = time.perf_counter()
            try:
                await self.round()
            except Refused as refused:  # the job is gone
                self._send(b"event: end\ndata: %s\n\n" % _dump({"error": str(refused)}))
                self.close()
                return
            except Exception:  # noqa: BLE001  nobody waits for this task, and the viewers would wait for ever
                _log.exception("a stream of the page has failed, and ends")
                self.close()
                return
            left = pause(time.perf_counter() - began, self._running(), self._limits)
            while left > 0:
                await asyncio.sleep(min(left, _COMMENT_S))
                left -= _COMMENT_S
                if left > 0:
                    self._send(b":\n\n", to_new=False)

    async def round(self) -> None:
        """Builds a message, and queues it for all viewers."""
        whole = await self._build()
        self.built += 1
        new = [viewer for viewer in self.viewers if viewer.is_new]
        others = [viewer for viewer in self.viewers if not viewer.is_new]
        before, self._before, self._first = self._before, whole, b""
        for viewer in new:
            self._greet(viewer)
        if others:
            data = self._message(difference(before, whole))
            for viewer in others:
                self._put(viewer, data)

    def _greet(self, viewer: _Viewer) -> None:
        self._first = self._first or self._message(self._before)
        viewer.is_new = False
        self._put(viewer, self._first)

    def _message(self, value: dict[str, Any]) -> bytes:
        return b"event: %s\ndata: " % self._event + _dump(value) + b"\n\n"

    def _send(self, message: bytes, *, to_new: bool = True) -> None:
        for viewer in list(self.viewers):
            if to_new or not viewer.is_new:
                self._put(viewer, message)

    def _put(self, viewer: _Viewer, message: bytes) -> None:
        try:
            viewer.queue.put_nowait(message)
        except asyncio.QueueFull:
            _log.info("a viewer of the page does not read; its connection is cut")
            self.leave(viewer)
            viewer.cut()


class Broadcasts:
    """All streams of a coordinator."""

    def __init__(self, limits: WebLimits) -> None:
        self._all: dict[Hashable, Broadcast] = {}
        self._limits = limits
        self.shares = Budget(limits.most_viewers)
        self._closed = False

    @contextmanager
    def share(self, who: str) -> Iterator[None]:
        """Counts a stream for as long as it is open; raises `NoRoom` if the payer has its share of them."""
        shares = self.shares
        if not shares.take(who, 1):
            raise NoRoom(
                f"no live view: {shares.held(who)} pages of {who} are open, and {shares.used} of all, of "
                f"{shares.total} at most: there may be no more than are left free, so close one"
            )
        try:
            yield
        finally:
            shares.add(who, -1)

    async def serve(
        self, request: web.Request, key: Hashable, event: str, build: Build, check: Callable[[], Awaitable[None]]
    ) -> web.StreamResponse:
        """Answers a request with a stream, until the viewer goes or must go.

        Viewers with the same key get the same messages. `build` returns the whole message. `check` raises if the viewer
        may not watch any more; its refusal is raised only before the stream has begun.
        """
        if self._closed:
            raise Draining("the coordinator is stopping")
        if key not in self._all:
            await build()  # a job that there is not is refused by a status
        broadcast = self._all.setdefault(key, Broadcast(event, build, lambda: len(self._all), self._limits))
        transport = request.transport
        viewer = broadcast.join(transport.abort if transport is not None else lambda: None)
        try:
            return await self._serve(request, viewer, check)
        finally:
            broadcast.leave(viewer)
            if not broadcast.viewers and self._all.get(key) is broadcast:
                del self._all[key]

    async def _serve(
        self, request: web.Request, viewer: _Viewer, check: Callable[[], Awaitable[None]]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        await response.prepare(request)
        loop = asyncio.get_running_loop()
        checked = loop.time()
        try:
            while (message := await viewer.queue.get()) is not None:
                await response.write(message)
                if loop.time() > checked + _CHECK_S:
                    checked = loop.time()
                    await check()
        except (ConnectionError, Refused):  # the viewer has gone, or may not watch any more
            pass
        return response

    async def close(self) -> None:
        """Ends all streams, each after a last whole message."""
        self._closed = True
        await asyncio.gather(*(broadcast.finish() for broadcast in list(self._all.values())))


def pause(took: float, running: int, limits: WebLimits = USUAL) -> float:
    """Returns the seconds to the next message, if the last one took so many, and so many broadcasts are running."""
    return min(limits.longest_s, max(limits.interval_s, took * running / limits.share))


def difference(before: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Returns a message without the members that have not changed, for viewers that have got the one before.

    In place of `members` it has `members_changed`, and `members_gone` with the ids of those that are no more.
    """
    if "members" not in whole:
        return whole
    known = {member["member_id"]: member for member in before.get("members", ())}
    changed = [member for member in whole["members"] if _looks(member) != _looks(known.pop(member["member_id"], {}))]
    rest = {name: value for name, value in whole.items() if name != "members"}
    return {**rest, "members_changed": changed, "members_gone": list(known)}


def _looks(member: dict[str, Any]) -> dict[str, Any]:
    """Returns what counts as a change of a member. Heartbeats come all the time, so silence counts in whole seconds."""
    return {**member, "silent_s": int(member.get("silent_s", 0))}


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
