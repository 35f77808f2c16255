"""A TCP relay between clients and a server: a test can make it a long way, reset its connections, or damage bytes."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["Relay", "relay"]


class Relay:
    """Listens on a free port of loopback and passes bytes on.

    Args:
        target: where to, "host:port".
        seconds: for which each piece of what the server says is held back, one after another.
        change: what becomes of each piece, in either direction; None for no change.

    Attributes:
        address: where clients connect to.
        resets: connections that were reset so far, counted at the client's side.
        damage: one byte in so many, on average, is changed on its way, in either direction; 0 for none. To be set.
        damaged: bytes that were changed so far.
    """

    def __init__(self, target: str, seconds: float = 0.0, change: Callable[[bytes], bytes] | None = None) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._seconds = seconds
        self._change = change or bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.resets = self.damaged = 0
        self.damage = 0
        self._random = random.Random(4)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def connections(self) -> int:
        """Connections since the last reset."""
        with self._lock:
            return len(self._pairs)

    def reset_all(self) -> None:
        """Both ends of every connection see a reset."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
        for pair in pairs:
            for end in pair:
                end.close()
        self.resets += len(pairs)

    def close(self) -> None:
        """Ends everything."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(10)  # then no connection comes any more
        self.reset_all()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a relay that waits for more is a long way
            with self._lock:
                self._pairs.append((client, server))
            for source, sink, seconds in ((client, server, 0.0), (server, client, self._seconds)):
                thread = threading.Thread(target=self._pass_on, args=(source, sink, seconds), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, seconds: float) -> None:
        how = socket.SHUT_RDWR
        try:
            while data := source.recv(1 << 16):
                time.sleep(seconds)
                sink.sendall(self._change(self._damaged(data) if self.damage else data))
            how = socket.SHUT_WR
        except OSError:  # the other side hears of a reset, too
            pass
        with suppress(OSError):
            sink.shutdown(how)

    def _damaged(self, data: bytes) -> bytes:
        changed = bytearray(data)
        with self._lock:
            for place in range(len(data)):
                if self._random.random() * self.damage < 1.0:
                    changed[place] ^= self._random.randrange(1, 256)
                    self.damaged += 1
        return bytes(changed)


@contextmanager
def relay(target: str, seconds: float = 0.0, change: Callable[[bytes], bytes] | None = None) -> Iterator[Relay]:
    """A relay for the block."""
    made = Relay(target, seconds, change)
    try:
        yield made
    finally:
        made.close()
