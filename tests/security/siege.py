"""A coordinator under attack: it, a job that is to notice nothing, and a stranger who opens calls by the thousand.

The coordinator and that job are processes of their own, so that what they take is theirs. The attacker speaks HTTP/2 by
hand (RFC 9113): it costs him little, and he need not end what he has begun.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from support.http2 import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    call_headers,
    connect,
    frame,
)

__all__ = ["Attacker", "Siege", "siege"]

_ACK = 1
_INITIAL_WINDOW_SIZE = 4
_WINDOW = 65_535
"""Of a stream and of a connection, until the other side says otherwise (6.9.2)."""

_PIECE = 16_384
_MOST_QUEUED = 1 << 20

_COORDINATOR = """
import json, sys
from pathlib import Path
from paceline_server import ServerSettings
from paceline_server.serving import serve

settings = json.loads(sys.argv[1])
settings |= {name: Path(text) for name, text in settings.items() if isinstance(text, str)}
serve(ServerSettings(listen="127.0.0.1:0", **settings), lambda address, _: print(address, flush=True))
"""

_NEIGHBOUR = """
import json, sys, threading, time
import paceline

def timed(call, *arguments, **options):
    began = time.monotonic()
    call(*arguments, **options)
    return time.monotonic() - began

def say(what):
    print(json.dumps(what), flush=True)

with paceline.join(sys.argv[1], job="neighbour", min_workers=1) as session:
    over = threading.Event()
    stored = []

    def store():
        while not over.is_set():
            stored.append(timed(session.store.set, "k", bytes(100_000)) + timed(session.store.get, "k"))

    thread = threading.Thread(target=store)
    thread.start()
    threading.Thread(target=lambda: (sys.stdin.readline(), over.set())).start()
    answers = []
    say("ready")
    while not over.wait(0.005):
        answers.append(timed(session.barrier, f"step {len(answers)}", timeout=60.0))
    thread.join()
say([answers, stored, session.generation])
"""


class Siege:
    """A coordinator, and a job with one member that steps.

    Attributes:
        address: of the coordinator.
    """

    def __init__(
        self,
        address: str,
        pid: int,
        neighbour: subprocess.Popen[str],
        said: Callable[[subprocess.Popen[str]], str],
    ) -> None:
        self.address = address
        self._pid = pid
        self._neighbour = neighbour
        self._said = said
        self._before = self.resident()

    def resident(self) -> int:
        """Bytes of the coordinator's resident memory."""
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def grown(self) -> int:
        """Bytes that the coordinator has more than before."""
        return self.resident() - self._before

    def noticed(self) -> tuple[list[float], list[float]]:
        """The job ends: seconds that to pass a barrier at the coordinator, and to set and get a value; in order.

        Raises:
            AssertionError: a call of it was refused, or its view has changed.
        """
        assert self._neighbour.stdin is not None
        with suppress(BrokenPipeError):
            self._neighbour.stdin.write("\n")
            self._neighbour.stdin.flush()
        answers, stored, generation = json.loads(self._said(self._neighbour))
        assert generation == 1
        return sorted(answers), sorted(stored)


@contextmanager
def siege(folder: Path, token: str = "", **settings: object) -> Iterator[Siege]:
    """All for the block.

    Args:
        folder: for what both write to stderr.
        token: that the job shows; empty for none.
        settings: of the coordinator; a path as text.
    """
    with ExitStack() as stack:
        log = stack.enter_context((folder / "stderr").open("w"))

        def start(code: str, word: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", code, word],
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        def said(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (folder / "stderr").read_text()
            return line.strip()

        coordinator = start(_COORDINATOR, json.dumps(settings), {})
        address = said(coordinator)
        neighbour = start(_NEIGHBOUR, address, {"PACELINE_TOKEN": token} if token else {})
        assert json.loads(said(neighbour)) == "ready"
        yield Siege(address, coordinator.pid, neighbour, said)


class Attacker:
    """Connections with calls that are begun, and what the coordinator says to them.

    Args:
        address: of the coordinator.
        token: is shown with each call; empty for none.
    """

    def __init__(self, address: str, token: str = "") -> None:
        self._address = address
        self._more = {"authorization": f"Bearer {token}"} if token else {}
        self._connections: list[_Connection] = []

    @property
    def sent(self) -> int:
        """Bytes."""
        return sum(each.sent for each in self._connections)

    @property
    def ended(self) -> int:
        """Calls that the coordinator has ended."""
        return sum(each.ended for each in self._connections)

    @property
    def heard(self) -> int:
        """Frames with data of the coordinator's answers."""
        return sum(each.heard for each in self._connections)

    def open(
        self,
        method: str,
        requests: Sequence[bytes],
        connections: int,
        *,
        deaf: bool = False,
        again: bool = False,
        whole: bool = False,
    ) -> None:
        """Begins a call for each request.

        Args:
            method: its full name.
            requests: each with its head (`http2.claimed`); it may be a part of one.
            connections: on so many.
            deaf: nothing of the answers is read.
            again: a call that has ended is made again.
            whole: a call's requests end with the one that is given.
        """
        headers = call_headers(method, self._more)
        for at in range(connections):
            there = connect(self._address)
            self._connections.append(_Connection(there, headers, requests[at::connections], deaf, again, whole))

    @property
    def saying(self) -> bool:
        """True if not all is sent that is to be said."""
        return any(each.saying for each in self._connections)

    def say(self, data: bytes, but: int = 0) -> None:
        """Sends more on all calls that are open, but for so many of the first; all that was said before is sent."""
        for at, each in enumerate(self._connections):
            each.say(data, but if at == 0 else 0)

    def press(self, seconds: float) -> None:
        """Sends what the coordinator lets through, for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            there = [each for each in self._connections if not each.over]
            readable, writable, _ = select.select(
                [each for each in there if each.hears], [each for each in there if each.outgoing], [], min(left, 0.2)
            )
            for connection in readable:
                connection.take()
            for connection in writable:
                connection.send()

    def close(self) -> None:
        """Hangs up."""
        for each in self._connections:
            each.socket.close()


class _Connection:
    def __init__(
        self, there: socket.socket, headers: bytes, requests: Sequence[bytes], deaf: bool, again: bool, whole: bool
    ) -> None:
        there.setblocking(False)
        self.socket = there
        self.over = False
        self.sent = self.ended = self.heard = 0
        self.outgoing = bytearray(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 1 << 30)))
        self.outgoing += frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30))
        self._deaf = deaf
        self._incoming = bytearray()
        self._window, self._initial = _WINDOW, _WINDOW
        self._windows: Counter[int] = Counter()
        """By stream: what it has been granted besides the initial window, less what has been sent."""
        self._left: deque[tuple[int, memoryview]] = deque()
        self._headers, self._again, self._whole = headers, again, whole
        self._open: dict[int, bytes] = {}
        """By stream: its request."""
        self._next = 1
        for request in requests:
            self._begin(request)
        self._fill()

    @property
    def hears(self) -> bool:
        """A deaf one hears until its requests are sent."""
        return not self._deaf or bool(self._left)

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def saying(self) -> bool:
        return bool(self._left) and not self.over

    def say(self, data: bytes, but: int) -> None:
        self._left += [(stream, memoryview(data)) for stream in list(self._open)[but:]]
        self._fill()

    def send(self) -> None:
        try:
            count = self.socket.send(self.outgoing)
        except OSError:
            self.over = True
            return
        self.sent += count
        del self.outgoing[:count]
        self._fill()

    def take(self) -> None:
        try:
            data = self.socket.recv(1 << 18)
        except OSError:
            data = b""
        self.over = not data
        self._incoming += data
        while len(self._incoming) >= 9:
            end = 9 + int.from_bytes(self._incoming[:3], "big")
            if len(self._incoming) < end:
                break
            kind, flags = self._incoming[3], self._incoming[4]
            stream = int.from_bytes(self._incoming[5:9], "big")
            self._hear(kind, flags, stream, bytes(self._incoming[9:end]))
            del self._incoming[:end]
        self._fill()

    def _hear(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE and stream:
            self._windows[stream] += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE:
            self._window += int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags & _ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                self._initial = value if name == _INITIAL_WINDOW_SIZE else self._initial
            self.outgoing += frame(SETTINGS, _ACK, 0, b"")
        elif kind == PING and not flags & _ACK:
            self.outgoing += frame(PING, _ACK, 0, payload)
        elif kind == DATA:
            self.heard += 1
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self._end(stream)

    def _begin(self, request: bytes) -> None:
        stream, self._next = self._next, self._next + 2
        self.outgoing += frame(HEADERS, END_HEADERS, stream, self._headers)
        self._open[stream] = request
        if request:
            self._left.append((stream, memoryview(request)))

    def _end(self, stream: int) -> None:
        request = self._open.pop(stream, None)
        if request is None:
            return
        self.ended += 1
        self._windows.pop(stream, None)
        self._left = deque(each for each in self._left if each[0] != stream)
        if self._again:
            self._begin(request)

    def _fill(self) -> None:
        """Queues data of the calls in turn, as far as the windows go."""
        for _ in range(len(self._left)):
            if len(self.outgoing) > _MOST_QUEUED or self._window <= 0:
                return
            stream, rest = self._left.popleft()
            room = min(self._window, self._initial + self._windows[stream], _PIECE)
            if room > 0:
                piece, rest = bytes(rest[:room]), rest[room:]
                self.outgoing += frame(DATA, END_STREAM if self._whole and not rest else 0, stream, piece)
                self._window -= len(piece)
                self._windows[stream] -= len(piece)
            if rest:
                self._left.append((stream, rest))
