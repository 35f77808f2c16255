"""Something to attack: a coordinator in a process of its own, and a worker of a job there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from paceline.cli.health import trouble_at
from pacelinepb.v1 import admin_pb2
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from support.processes import Worker

__all__ = ["Targets", "targets_in"]

WORKER = """
with paceline.join(job="target") as session:
    emit("joined")
    wait_for_go()
    emit("sum", value=float(session.group.all_reduce(np.ones(3)).sum()))
"""


@dataclass
class Targets:
    """A coordinator in a process of its own, and a worker of a job there."""

    coordinator: str
    process: subprocess.Popen[str]
    worker: Worker
    door: str
    log: Path

    def resident(self) -> int:
        """Bytes of the coordinator's resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def files(self) -> int:
        """Files that the coordinator has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def check(self) -> None:
        """Both serve, and neither has anything to complain of."""
        assert not trouble_at(self.coordinator)
        self.worker.go()
        assert self.worker.expect("sum")["value"] == 3.0
        assert self.worker.wait() == 0
        assert self.worker.stderr == ""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(10) == 0
        assert "Traceback" not in self.log.read_text()


@contextmanager
def _coordinator_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """The process, its address and its log."""
    log = folder / "coordinator.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline_server", "--listen", "127.0.0.1:0"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().split()[-1], log
    finally:
        process.kill()
        process.communicate()


@contextmanager
def targets_in(folder: Path) -> Iterator[Targets]:
    """Both for the block; the coordinator's log is in the folder."""
    with ExitStack() as stack:
        process, address, log = stack.enter_context(_coordinator_process(folder))
        worker = Worker(WORKER, {"PACELINE_COORDINATOR": address, "PACELINE_MIN_WORKERS": "1"})
        stack.callback(worker.close)
        worker.expect("joined")
        with grpc.insecure_channel(address) as channel:
            detail = AdminServiceStub(channel).GetJob(admin_pb2.GetJobRequest(job="target"), timeout=10)
        yield Targets(address, process, worker, detail.members[0].member.address, log)
