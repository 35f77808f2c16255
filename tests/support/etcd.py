"""Real etcd clusters of one node or three, on this machine (Debian's etcd-server)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.certificates import CertificateFolder
from support.needs import is_required
from support.netns import Host
from support.ports import free_port

__all__ = ["Cluster", "cluster", "needs_etcd"]

_READY_S = 30.0

_missing = shutil.which("etcd") is None or shutil.which("etcdctl") is None
if _missing and is_required("etcd"):
    raise RuntimeError("REQUIRE=etcd, but etcd is not installed (etcd-server and etcd-client)")

needs_etcd = pytest.mark.skipif(_missing, reason="etcd is not installed")
"""Skips a test without etcd; with REQUIRE=etcd its absence is an error."""


class Cluster:
    """Some nodes.

    Args:
        folder: for their data and their log.
        size: how many.
        hosts: of the test's network, one for each; none for this machine.
        tls: certificates; None for connections without TLS.

    Attributes:
        endpoints: of the nodes, for callers.
    """

    def __init__(
        self, folder: Path, size: int, hosts: Sequence[Host] = (), tls: CertificateFolder | None = None
    ) -> None:
        self._hosts, self._tls = hosts, tls
        scheme, files = "http", list[str]()
        if tls is not None:
            files = ["--cert-file", f"{tls.path}/coordinator.pem", "--key-file", f"{tls.path}/coordinator.key"]
            files += ["--trusted-ca-file", f"{tls.path}/ca.pem", "--client-cert-auth"]
            scheme = "https"
        first, addresses = free_port(2 * size), [host.address for host in hosts] or ["127.0.0.1"] * size
        self.endpoints = [f"{addresses[n]}:{first + 2 * n}" for n in range(size)]
        peers = [f"http://{addresses[n]}:{first + 2 * n + 1}" for n in range(size)]
        members = ",".join(f"n{n}={peer}" for n, peer in enumerate(peers))
        self._commands = [
            [
                "etcd",
                *("--name", f"n{n}", "--data-dir", str(folder / f"n{n}"), "--logger", "zap", "--log-level", "error"),
                *("--listen-client-urls", f"{scheme}://{endpoint}"),
                *("--advertise-client-urls", f"{scheme}://{endpoint}", *files),
                *("--listen-peer-urls", peers[n], "--initial-advertise-peer-urls", peers[n]),
                *("--initial-cluster", members, "--initial-cluster-state", "new"),
            ]
            for n, endpoint in enumerate(self.endpoints)
        ]
        self._log = (folder / "etcd.log").open("ab")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for n in range(size):
            self.start(n)
        self.wait()

    def url(self, prefix: str) -> str:
        """A value of `--state`."""
        files = ""
        if self._tls is not None:
            path = self._tls.path
            files = f"?ca={path}/ca.pem&cert={path}/member.pem&key={path}/member.key"
        return f"etcd://{','.join(self.endpoints)}/{prefix}{files}"

    def start(self, node: int) -> None:
        """Starts a node, or starts it again."""
        self._processes[node] = subprocess.Popen(
            self._at(node, self._commands[node]), stdout=self._log, stderr=self._log
        )

    def signal(self, node: int, number: signal.Signals) -> None:
        """Sends a signal to a node."""
        self._processes[node].send_signal(number)

    def kill(self, node: int) -> None:
        """Kills a node."""
        self._processes[node].kill()
        self._processes[node].wait()

    def leader(self) -> int:
        """The node that leads the cluster.

        Raises:
            CalledProcessError: a node does not answer.
        """
        answer = self._ctl("endpoint", "status", "--write-out=fields")
        flags = [line for line in answer.splitlines() if line.startswith(('"MemberID"', '"Leader"'))]
        ids = [line.split(":")[1].strip() for line in flags]
        members, leaders = ids[::2], ids[1::2]
        return members.index(leaders[0])

    def wipe(self) -> None:
        """Deletes all keys."""
        self._ctl("del", "--prefix", "")

    def wait(self) -> None:
        """Waits until the cluster answers."""
        give_up = time.monotonic() + _READY_S
        while True:
            try:
                self._ctl("get", "x")
                return
            except subprocess.CalledProcessError as error:
                if time.monotonic() > give_up:
                    raise AssertionError(f"etcd does not come up: {error.stderr}") from None

    def close(self) -> None:
        """Kills all nodes."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._log.close()

    def _at(self, node: int, command: list[str]) -> list[str]:
        return self._hosts[node].command(command) if self._hosts else command

    def _ctl(self, *arguments: str) -> str:
        files: list[str] = []
        if self._tls is not None:
            path = self._tls.path
            files = [f"--cacert={path}/ca.pem", f"--cert={path}/member.pem", f"--key={path}/member.key"]
        command = ["etcdctl", *files, f"--endpoints={','.join(self.endpoints)}", "--command-timeout=1s", *arguments]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(self._at(0, command), env=environment, check=True, capture_output=True, text=True)
        return done.stdout


@contextmanager
def cluster(
    folder: Path, size: int = 1, hosts: Sequence[Host] = (), tls: CertificateFolder | None = None
) -> Iterator[Cluster]:
    """A cluster, for as long as the block lasts; see `Cluster`."""
    started = Cluster(folder, size, hosts, tls)
    try:
        yield started
    finally:
        started.close()
