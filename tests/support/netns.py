"""Several hosts on one machine: Linux network namespaces on a bridge, each with an address and a name of its own.

Cables are pulled without a word to either side, for that is what makes partitions hard: nothing is refused or reset,
packets only stop coming. Needs root and iproute2, and neither a packet filter nor netem. The bridge is in a namespace
too, so that nothing of this is seen on the machine's own network, and two tests may run side by side.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

__all__ = ["Host", "Network", "network"]

_NOBODY = "02:00:00:00:00:fe"
"""A hardware address that no host has: what is sent there is lost silently."""

_numbers = itertools.count(1)


class Host:
    """One host.

    Attributes:
        name: of the host; that of its namespace too.
        address: its IP address.
    """

    def __init__(self, name: str, address: str, port: str) -> None:
        self.name = name
        self.address = address
        self._port = port  # its side of the cable at the bridge

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs a program there; its process id is that of the process which is started."""
        rename = f'echo {self.name} >/proc/sys/kernel/hostname && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", rename, "sh", *words]

    def kill(self) -> None:
        """SIGKILL to everything that runs there."""
        for pid in _ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


class Network:
    """Hosts that reach each other, until a test says otherwise.

    Attributes:
        hosts: all of them.
    """

    def __init__(self, count: int) -> None:
        stem = f"pl{os.getpid()}n{next(_numbers)}"
        self._switch = f"{stem}sw"
        self.hosts = [Host(f"{stem}h{n}", f"10.77.0.{n}", f"port{n}") for n in range(1, count + 1)]

    def build(self) -> None:
        """Makes the namespaces."""
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            _ip("netns", "add", host.name)
            _ip("link", "add", host._port, "netns", self._switch, "type", "veth", "peer", "eth0", "netns", host.name)
            _ip("-n", self._switch, "link", "set", host._port, "master", "bridge", "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")

    def cut(self, host: Host) -> None:
        """Nobody reaches that host any more, nor it anybody."""
        _ip("-n", self._switch, "link", "set", host._port, "down")

    def heal(self, host: Host) -> None:
        """Undoes `cut`."""
        _ip("-n", self._switch, "link", "set", host._port, "up")

    def cut_pair(self, a: Host, b: Host) -> None:
        """These two do not reach each other any more; all others reach both."""
        for here, there in ((a, b), (b, a)):
            _ip("-n", here.name, "neigh", "replace", there.address, "lladdr", _NOBODY, "nud", "permanent",
                "dev", "eth0")  # fmt: skip

    def heal_pair(self, a: Host, b: Host) -> None:
        """Undoes `cut_pair`."""
        for here, there in ((a, b), (b, a)):
            _ip("-n", here.name, "neigh", "del", there.address, "dev", "eth0")

    def close(self) -> None:
        """Ends whatever runs on the hosts, and takes them away, as far as they were made."""
        there = _ip("netns", "list").split()
        for host in self.hosts:
            if host.name in there:
                host.kill()
                _ip("netns", "del", host.name)
        if self._switch in there:
            _ip("netns", "del", self._switch)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """So many hosts for the block; skips the test, or fails it, where there can be none."""
    _require_root()
    made = Network(count)
    try:
        made.build()
        yield made
    finally:
        made.close()


def _require_root() -> None:
    if os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("unshare") is not None:
        return
    text = "network namespaces need root, iproute2 and util-linux"
    if os.environ.get("REQUIRE_ROOT") == "1":
        pytest.fail(text)
    pytest.skip(f"{text} (REQUIRE_ROOT=1 makes this a failure)")


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
