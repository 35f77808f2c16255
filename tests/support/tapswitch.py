"""A switch in user space between TAP devices, with cables that delay, lose and are slow: netem without netem.

A script: `tapnet` runs it as a process of its own. It makes a TAP device, eth0, in each namespace, and holds the other
end of all of them: it takes a frame from the host that sends it, lets the host's cable decide when it comes through, if
at all, and gives it to the host that has its destination address. Which frames are lost follows from a seed and from
the order in which a host sends them. Needs root and /dev/net/tun, and nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Cable", "Gate", "Switch"]

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_LONGEST_FRAME = 65536
_BURST = 32
"""Frames that are taken from one host before another has its turn."""


@dataclass(frozen=True, slots=True)
class Cable:
    """What happens to the frames that a host sends.

    Attributes:
        delay: seconds that each takes; there and back is the sum of two cables' delays.
        rate: bytes a second; 0 for any.
        loss: the share of frames that do not come through.
        queue: seconds that a frame may wait for those before it; longer, and it is lost, as in any router.
    """

    delay: float = 0.0
    rate: float = 0.0
    loss: float = 0.0
    queue: float = 0.1


class Gate:
    """A cable at work: pure, with time as an argument.

    Args:
        cable: what it is like.
        seed: of the losses.
    """

    def __init__(self, cable: Cable, seed: str) -> None:
        self.lost = self.late = 0
        self._cable = cable
        self._random = random.Random(seed)  # luck, not secrets
        self._free = 0.0  # when the last frame will be on its way

    def arrival(self, now: float, size: int) -> float | None:
        """When a frame that is sent now comes through; None if it does not.

        Args:
            now: seconds.
            size: bytes.
        """
        if self._cable.loss and self._random.random() < self._cable.loss:
            self.lost += 1
            return None
        if self._cable.rate:
            if self._free - now > self._cable.queue:
                self.late += 1
                return None
            self._free = max(self._free, now) + size / self._cable.rate
            now = self._free
        return now + self._cable.delay


class Switch:
    """Forwards frames between devices, which it learns the addresses behind.

    Args:
        devices: one for each host.
        gates: the cable of each.
    """

    def __init__(self, devices: Sequence[int], gates: Sequence[Gate]) -> None:
        self.frames = 0
        self._devices = devices
        self._gates = gates
        self._behind: dict[bytes, int] = {}  # which host has that hardware address
        self._on_their_way: list[tuple[float, int, int, bytes]] = []  # when, number of the frame, where from, frame

    def run(self, end: int) -> None:
        """Forwards until the descriptor `end` can be read."""
        with selectors.DefaultSelector() as selector:
            for number, device in enumerate(self._devices):
                selector.register(device, selectors.EVENT_READ, number)
            selector.register(end, selectors.EVENT_READ, None)
            while True:
                first = self._on_their_way[0][0] if self._on_their_way else None
                for key, _ in selector.select(None if first is None else max(0.0, first - time.monotonic())):
                    if key.data is None:
                        return
                    self._take(key.data)
                self._deliver(time.monotonic())

    def _take(self, source: int) -> None:
        for _ in range(_BURST):
            try:
                frame = os.read(self._devices[source], _LONGEST_FRAME)
            except BlockingIOError:
                return
            self.frames += 1
            self._behind[frame[6:12]] = source
            at = self._gates[source].arrival(time.monotonic(), len(frame))
            if at is not None:
                heapq.heappush(self._on_their_way, (at, self.frames, source, frame))

    def _deliver(self, now: float) -> None:
        while self._on_their_way and self._on_their_way[0][0] <= now:
            _, _, source, frame = heapq.heappop(self._on_their_way)
            there = self._behind.get(frame[:6])
            for number in range(len(self._devices)) if there is None else (there,):
                if number == source:
                    continue
                try:
                    os.write(self._devices[number], frame)
                except OSError as error:  # the device's queue is full, or it is down: a lost frame
                    if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.EIO):
                        raise


def main() -> None:
    """Makes the devices, says so, and forwards until standard input ends; then tells what came of the frames."""
    plan = json.loads(sys.argv[1])
    devices = [_tap(name) for name in plan["namespaces"]]
    gates = [Gate(Cable(**cable), f"{plan['seed']}-{n}") for n, cable in enumerate(plan["cables"])]
    switch = Switch(devices, gates)
    os.write(1, b"ready\n")
    switch.run(0)
    told = {"frames": switch.frames, "lost": sum(g.lost for g in gates), "late": sum(g.late for g in gates)}
    os.write(1, json.dumps(told).encode() + b"\n")


def _tap(namespace: str) -> int:
    """Makes eth0 of a namespace; it lives as long as the descriptor that this returns."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net", "rb") as home, open(f"/run/netns/{namespace}", "rb") as there:
        try:
            if libc.setns(there.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))
        finally:
            libc.setns(home.fileno(), _CLONE_NEWNET)
    return device


if __name__ == "__main__":
    main()
