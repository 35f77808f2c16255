"""A bad network for one worker process: relays between it and its peers, of which one changes one bit when told to.

`send_through` is called inside the worker, before it joins. Connections that it makes to peers go through a relay then:
gRPC and those for data. Frames travel on connections of the side that writes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from paceline._links.tcp import _tcp_kind
from paceline.credentials import Credentials
from support.relay import Relay

__all__ = ["Flipper", "send_through"]


class Flipper:
    """Changes one bit, once, of the first piece that holds a pattern, after `arm`.

    Args:
        pattern: bytes that only payloads hold; the bit is in the middle of it. None: in any piece of 400 bytes or more,
            97 bytes before its end.

    Attributes:
        flipped: set when it is done.
    """

    def __init__(self, pattern: bytes | None = None) -> None:
        self.flipped = threading.Event()
        self._pattern = pattern
        self._armed = False
        self._lock = threading.Lock()

    def arm(self) -> None:
        """The next piece that fits is changed."""
        self._armed = True

    def __call__(self, data: bytes) -> bytes:
        """The piece as it is passed on."""
        at = self._place(data)
        with self._lock:
            if at < 0 or not self._armed:
                return data
            self._armed = False
        self.flipped.set()
        return data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :]

    def _place(self, data: bytes) -> int:
        if self._pattern is None:
            return len(data) - 97 if len(data) >= 400 else -1
        found = data.find(self._pattern)
        return found if found < 0 else found + len(self._pattern) // 2


def send_through(change: Callable[[bytes], bytes]) -> None:
    """From now on this process reaches peers through relays, which change what they pass on like this."""
    relays: dict[str, Relay] = {}
    lock = threading.Lock()

    def by_relay(address: str) -> str:
        with lock:
            if address not in relays:
                relays[address] = Relay(address, change=change)
            return relays[address].address

    reach, member_channel = _tcp_kind._reach, Credentials.member_channel

    async def reaching(loop: Any, host: str, port: int) -> Any:
        there, _, number = by_relay(f"{host}:{port}").rpartition(":")
        return await reach(loop, there, int(number))

    def channel(self: Credentials, address: str, options: Any) -> Any:
        return member_channel(self, by_relay(address), options)

    _tcp_kind._reach = reaching
    Credentials.member_channel = channel  # type: ignore[method-assign]
