"""Several hosts on one machine: Linux network namespaces on a bridge, each with addresses and a name of its own.

Cables are pulled without a word to either side, for that is what makes partitions hard: nothing is refused or reset,
packets only stop coming. Needs root and iproute2, and neither a packet filter nor netem (`tapnet` has cables that lose
and delay). The bridge is in a namespace too, so that nothing of this is seen on the machine's own network, and two
tests may run side by side.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from support.needs import missing

__all__ = ["Host", "Network", "network", "up"]

_NOBODY = "02:00:00:00:00:fe"
"""A hardware address that no host has: what is sent there is lost silently."""

_numbers = itertools.count(1)


class Host:
    """One host.

    Attributes:
        name: of the host; that of its namespace too.
        address, address6: its IP addresses.
        etc: files that programs there find in /etc in place of the machine's own, by name ("hosts"); what is written
            into one while they run is seen by them.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"10.77.0.{number}"
        self.address6 = f"fd77::{number}"
        self.etc: dict[str, Path] = {}
        self._port = f"port{number}"  # its side of the cable at the bridge

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs a program there; its process id is that of the process which is started."""
        mounts = "".join(f"mount --bind '{file}' /etc/{name} && " for name, file in self.etc.items())
        script = f'echo {self.name} >/proc/sys/kernel/hostname && {mounts}exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "sh", "-c", script, "sh", *words]

    def limit(self, megabits: int) -> None:
        """Sends no faster than that from now on, as an interface of that speed would."""
        _tool("tc", "-n", self.name, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{megabits}mbit",
              "burst", "256k", "latency", "50ms")  # fmt: skip

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
        self._routers: list[str] = []
        self.hosts = [Host(f"{stem}h{n}", n) for n in range(1, count + 1)]

    def build(self) -> None:
        """Makes the namespaces."""
        for name in (self._switch, *(host.name for host in self.hosts)):
            _ip("netns", "add", name)
        self._lay_cables()
        for host in self.hosts:
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.name, "address", "add", f"{host.address6}/64", "dev", "eth0", "nodad")

    def _lay_cables(self) -> None:
        """Gives each host its eth0."""
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host in self.hosts:
            _ip("link", "add", host._port, "netns", self._switch, "type", "veth", "peer", "eth0", "netns", host.name)
            _ip("-n", self._switch, "link", "set", host._port, "master", "bridge", "up")

    def add_interface(self, host: Host, device: str, address: str, router: str) -> None:
        """Gives a host another interface, on a network of its own, with the default route.

        Args:
            host: which.
            device: name of the interface.
            address: with the length of its prefix, "10.1.1.1/24".
            router: the same for the other end of the cable, which passes nothing on, and where nobody listens.
        """
        far = f"{host._port}{device}"
        space = f"{host.name}r"
        self._routers.append(space)
        _ip("netns", "add", space)
        _ip("link", "add", far, "netns", space, "type", "veth", "peer", device, "netns", host.name)
        _ip("-n", space, "link", "set", far, "up")
        _ip("-n", space, "address", "add", router, "dev", far)
        _ip("-n", host.name, "address", "add", address, "dev", device)
        _ip("-n", host.name, "link", "set", device, "up")
        _ip("-n", host.name, "route", "add", "default", "via", router.partition("/")[0], "dev", device)

    def cut(self, host: Host) -> None:
        """Nobody reaches that host any more, nor it anybody."""
        _ip("-n", self._switch, "link", "set", host._port, "down")

    def heal(self, host: Host) -> None:
        """Undoes `cut`."""
        _ip("-n", self._switch, "link", "set", host._port, "up")

    def readdress(self, host: Host, address: str | None) -> None:
        """Gives a host this IPv4 address in place of the one that it had; with None it has none until the next."""
        _ip("-4", "-n", host.name, "address", "flush", "dev", "eth0")
        if address is not None:
            host.address = address
            _ip("-n", host.name, "address", "add", f"{address}/24", "dev", "eth0")

    def lose(self, address: str) -> None:
        """What any host sends to that address is lost from now on, silently."""
        for host in self.hosts:
            _ip("-n", host.name, "neigh", "replace", address, "lladdr", _NOBODY, "nud", "permanent",
                "dev", "eth0")  # fmt: skip

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
        for name in (self._switch, *self._routers):
            if name in there:
                _ip("netns", "del", name)


@contextmanager
def network(count: int) -> Iterator[Network]:
    """So many hosts for the block; skips the test, or fails it, where there can be none."""
    with up(Network(count)) as made:
        yield made


@contextmanager
def up(made: Network) -> Iterator[Network]:
    """That network for the block."""
    _require_root()
    try:
        made.build()
        yield made
    finally:
        made.close()


def _require_root() -> None:
    if os.geteuid() == 0 and all(shutil.which(tool) is not None for tool in ("ip", "tc", "unshare")):
        return
    missing("root", "network namespaces need root, iproute2 and util-linux")


def _ip(*words: str) -> str:
    return _tool("ip", *words)


def _tool(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
