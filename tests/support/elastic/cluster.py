"""A coordinator and trainers as real processes, and what must be true of what they told."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

import paceline
from paceline._session.stack_file import stacks_by_signal
from paceline.cli.launcher.reports import ExitReports
from paceline.credentials import IN_THE_CLEAR
from paceline.launch import WorkerSettings
from pacelinepb.v1.admin_pb2 import RestartJobRequest
from pacelinepb.v1.admin_pb2_grpc import AdminServiceStub
from pacelinepb.v1.session_pb2 import ProcessIdentity
from support.elastic.brake import Brake
from support.elastic.faults import Fault
from support.elastic.problem import BATCH, SAMPLES, one_process
from support.netns import Host
from support.ports import free_port
from support.python_process import Process, start_python

if TYPE_CHECKING:  # it needs the extra "tls"
    from support.certificates import CertificateFolder

__all__ = ["Cluster", "Trainer", "cluster"]

_TESTS = Path(__file__).parent.parent.parent
_TRAINER = "support/elastic/trainer.py"
"""Unless the plan has another, below tests/."""

_numbers = itertools.count()


class Trainer:
    """One worker process and what it has told so far."""

    def __init__(
        self, plan: dict[str, Any], environment: dict[str, str], changed: threading.Condition, host: Host | None = None
    ) -> None:
        self._brake, self._name = Brake(Path(plan["brake"])), str(next(_numbers))
        self._brake.press(self._name, lets_go=True)
        command = [str(_TESTS / plan.get("trainer", _TRAINER)), json.dumps(plan)]
        self.host = host
        self.process = start_python(command, environment, host)
        self.pid = self.process.pid
        self.events: list[dict[str, Any]] = []
        self.stderr = ""
        self._changed = changed
        self._threads = [threading.Thread(target=self._read, daemon=True), threading.Thread(target=self._complain)]
        for thread in self._threads:
            thread.start()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [event for event in self.events if event["event"] == kind]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def hold_others(self) -> None:
        """Has the line go slowly until this one begins a step: it is on its way (`Brake`)."""
        self._brake.press(self._name, lets_go=True)

    def thaw(self) -> None:
        """Ends a freeze."""
        self.hold_others()
        self.signal(signal.SIGCONT)

    def close(self) -> None:
        """Kills it if it still runs."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def go(self) -> None:
        """Lets it join."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
            if self.events[-1]["event"] == "attempt":
                self._brake.release(self._name)
        self.process.wait()
        self._brake.release(self._name)
        with self._changed:
            self._changed.notify_all()

    def _complain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.stderr += line
                self._changed.notify_all()


class Cluster:
    """Processes of one job.

    Args:
        folder: for the state file and whatever the test keeps.
        least, most: bounds of the world.
        total: the last step.
        failure_timeout, step_timeout: seconds.
        witness: whether exits are told to the coordinator, as a launcher would.
        host: where the coordinator runs; None for this one. From here a host cannot be reached: `witness` is to be off.
        coordinators: addresses of coordinators that somebody else starts and ends; empty for one of the cluster's own.
        certificates: for TLS everywhere; None for none.
        variables: more for the environment of every trainer.
        plan: more for every trainer (see trainer.py).
    """

    def __init__(
        self,
        folder: Path,
        *,
        least: int = 1,
        most: int = 8,
        total: int = 8,
        failure_timeout: float = 3.0,
        step_timeout: float = 600.0,
        witness: bool = True,
        host: Host | None = None,
        coordinators: str = "",
        certificates: CertificateFolder | None = None,
        variables: Mapping[str, str] | None = None,
        **plan: Any,
    ) -> None:
        self.folder = folder
        self._certificates = certificates
        self.total = total
        self.trainers: list[Trainer] = []
        self._plan = {"total": total, "wrapper": "ddp", "join_timeout": 30.0, "model_seed": 5, **plan}
        self._plan["brake"] = str(folder / "brake")
        self._scheduled = self._plan["wrapper"] == "torch"
        self.address = coordinators or f"{'127.0.0.1' if host is None else host.address}:{free_port()}"
        self._host = host
        self.environment = {
            "PACELINE_COORDINATOR": self.address,
            "PACELINE_JOB": "job",
            "PACELINE_MIN_WORKERS": str(least),
            "PACELINE_MAX_WORKERS": str(most),
            "PACELINE_FAILURE_TIMEOUT": str(failure_timeout),
            "PACELINE_STEP_TIMEOUT": str(step_timeout),
            "PACELINE_FLIGHT_DIR": "off",
            **({} if certificates is None else certificates.environment),
            **(variables or {}),
        }
        self._changed = threading.Condition()
        self._witness = witness
        credentials = IN_THE_CLEAR if certificates is None else certificates.credentials
        self._reports = ExitReports(WorkerSettings(self.address, "job", 1, 1), credentials)
        self._watchers: list[threading.Thread] = []
        self.coordinator: Process | None = None
        if not coordinators:
            self.start_coordinator()

    # What a test does -------------------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """Starts the coordinator on its state file, and waits until it listens. Its log is in the folder."""
        state = str(self.folder / "state.db")
        # Workers that are started together are in one view, however slow the machine is just then.
        command = ["-m", "paceline_server", "--listen", self.address, "--state", state, "--settle-time", "2"]
        command += [] if self._certificates is None else self._certificates.arguments
        with (self.folder / "coordinator.log").open("a") as log:
            self.coordinator = start_python(command, {}, self._host, stderr=log.fileno())
        assert self.coordinator.stdin is not None
        assert self.coordinator.stdout is not None
        self.coordinator.stdin.close()
        with self.coordinator.stdout as said:
            assert "listening" in said.readline(), (self.folder / "coordinator.log").read_text()

    def kill_coordinator(self) -> None:
        """SIGKILL."""
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()

    @contextmanager
    def slowly(self) -> Iterator[None]:
        """Steps take longer (`Brake`) until the block ends, so that the line has not ended when the test acts."""
        brake = Brake(self.folder / "brake")
        brake.press("test")
        try:
            yield
        finally:
            brake.release("test")

    def kill_at_once(self, trainers: Sequence[Trainer]) -> None:
        """SIGKILL to several, which are all stopped before: none of them goes on after the first one's death."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for trainer in trainers:
                trainer.signal(number)

    def restart_job(self) -> None:
        """What `paceline restart` asks for."""
        with grpc.insecure_channel(self.address) as channel:
            AdminServiceStub(channel).RestartJob(RestartJobRequest(job="job"), timeout=10)

    def start(
        self,
        count: int,
        faults: Sequence[Fault] = (),
        *,
        host: Host | None = None,
        go: bool = True,
        ranks: Sequence[int] | None = None,
        **plan: Any,
    ) -> list[Trainer]:
        """Starts trainers that all have the same faults before them, on a host of the test's network or on this one.

        Without `go` they have loaded what they need, and wait for `Trainer.go`. They claim `ranks` if there are any.
        """
        whole = {**self._plan, **plan, "faults": [fault.plan() for fault in faults]}
        environments = [self.environment] * count if ranks is None else [self._claiming(rank) for rank in ranks]
        started = [Trainer(whole, environment, self._changed, host) for environment in environments]
        self.trainers += started
        if self._witness:
            for trainer in started:
                watcher = threading.Thread(target=self._watch, args=(trainer,), daemon=True)
                watcher.start()
                self._watchers.append(watcher)
        self.wait_until(lambda: all(trainer.events for trainer in started), "all are ready")
        for trainer in started if go else ():
            trainer.go()
        return started

    def _claiming(self, rank: int) -> dict[str, str]:
        """The environment of a trainer that claims a rank."""
        world = {"PACELINE_RANK": str(rank), "PACELINE_WORLD_SIZE": self.environment["PACELINE_MAX_WORKERS"]}
        return {**{name: value for name, value in self.environment.items() if "_WORKERS" not in name}, **world}

    def wait_until(self, happened: Callable[[], bool], what: str, timeout: float = 45.0) -> None:
        """Waits for something that the trainers' events show, or what they complain of."""
        with self._changed:
            assert self._changed.wait_for(happened, timeout), f"not within {timeout} s: {what}\n{self}"

    def wait_for_step(self, step: int, trainers: Sequence[Trainer] | None = None) -> None:
        """Waits until one of them has applied a step."""
        among = self.trainers if trainers is None else trainers
        self.wait_until(lambda: any(e["step"] >= step for t in among for e in t.of("applied")), f"step {step} applied")

    def wait(self, timeout: float = 45.0) -> dict[int, int]:
        """Waits for all to end; exit codes by pid."""
        deadline = time.monotonic() + timeout
        codes = {}
        for trainer in self.trainers:
            try:
                codes[trainer.pid] = trainer.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{_stands(trainer.pid)} after {timeout} s\n{self}") from None
        for trainer in self.trainers:
            for thread in trainer._threads:
                thread.join(10)
        return codes

    # What must be true ------------------------------------------------------------------------------------------------

    @property
    def finishers(self) -> list[Trainer]:
        """Who came to the end."""
        return [trainer for trainer in self.trainers if trainer.of("done")]

    def line(self) -> dict[int, int]:
        """The generation of each step of the line: the last one in which anybody applied it."""
        found: dict[int, int] = {}
        for trainer in self.trainers:
            for event in trainer.of("applied"):
                found[event["step"]] = max(found.get(event["step"], 0), event["generation"])
        return found

    def check(self, *, count: int | None = None, seed: int = 5, batch: int = BATCH) -> None:
        """I5 and I6, and the losses and weights of an undisturbed run: call it when all have ended."""
        ends = [trainer.of("done")[0] for trainer in self.finishers]
        assert ends, f"nobody came to the end\n{self}"
        if count is not None:
            assert len(ends) == count, f"{len(ends)} came to the end, not {count}\n{self}"
        assert len({end["digest"] for end in ends}) == 1, f"weights differ\n{self}"
        assert all(end["step"] == self.total for end in ends), str(self)
        _, weights = one_process([self.total], seed, batch, scheduled=self._scheduled)
        np.testing.assert_allclose(ends[0]["weights"], weights[self.total], rtol=1e-9, atol=1e-12)
        self.check_samples(self.total, batch)
        self.check_losses(self.total, seed=seed, batch=batch)

    def check_samples(self, last: int, batch: int = BATCH) -> None:
        """I6: the line has all steps up to that one, and each step used each sample of its batch once."""
        line = self.line()
        assert sorted(line) == list(range(1, last + 1)), f"steps of the line: {line}\n{self}"
        attempts: dict[tuple[int, int], list[int]] = {}
        for trainer in self.trainers:
            for event in trainer.of("attempt"):
                attempts.setdefault((event["step"], event["generation"]), []).extend(event["indices"])
        sampler = paceline.ElasticSampler(SAMPLES, global_batch=batch)
        for step, generation in line.items():
            used = sorted(attempts.get((step, generation), []))
            assert used == sorted(sampler.batch(step - 1).tolist()), f"samples of step {step} in {generation}\n{self}"

    def check_losses(self, last: int, *, seed: int = 5, batch: int = BATCH, rtol: float = 1e-9) -> None:
        """The mean loss of each step of the line, over all who took part in it, is that of one process."""
        line = self.line()
        found = dict.fromkeys(range(1, last + 1), 0.0)
        for trainer in self.trainers:
            for event in trainer.of("loss"):
                if event["step"] <= last and event["generation"] == line[event["step"]]:
                    found[event["step"]] += event["value"]
        losses, _ = one_process([last], seed, batch, scheduled=self._scheduled)
        np.testing.assert_allclose(list(found.values()), losses, rtol=rtol, err_msg=f"losses\n{self}")

    def redone(self) -> dict[int, int]:
        """By generation, how many attempts of it were undone at the member that lost most."""
        lost: dict[int, int] = {}
        for trainer in self.trainers:
            for generation in {e["generation"] for e in trainer.of("undone")}:
                count = len([e for e in trainer.of("undone") if e["generation"] == generation])
                lost[generation] = max(lost.get(generation, 0), count)
        return lost

    def close(self) -> None:
        """Ends everything."""
        for trainer in self.trainers:
            trainer.close()
        if self.coordinator is not None:
            self.coordinator.kill()
            self.coordinator.wait()
        for watcher in self._watchers:
            watcher.join(10)
        self._reports.__exit__(None, None, None)

    def _watch(self, trainer: Trainer) -> None:
        ticks = _start_ticks(trainer.pid)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        identity = ProcessIdentity(host=socket.gethostname(), pid=trainer.pid, boot_id=boot, start_ticks=ticks)
        self._reports.report(identity, trainer.process.wait())

    def __str__(self) -> str:
        lines = []
        for trainer in self.trainers:
            lines.append(f"--- pid {trainer.pid}, exit {trainer.process.poll()}")
            for event in trainer.events:
                facts = {k: v for k, v in event.items() if k not in ("at", "event", "weights", "indices", "net")}
                lines.append(f"  {event['at']:.3f} {event['event']} {facts}")
            lines.append(trainer.stderr[-3000:])
        for log in sorted(self.folder.glob("coordinator*.log")):
            lines += [f"--- {log.stem}", log.read_text()[-4000:]]
        return "\n".join(lines)


def _stands(pid: int) -> str:
    """Says that a process has not ended: its state, and the stacks of its threads."""
    status = Path(f"/proc/{pid}/status").read_text()
    state = next(line for line in status.splitlines() if line.startswith("State:"))
    try:
        stacks = stacks_by_signal(pid)
    except OSError as error:  # it is stopped, or has not joined yet
        stacks = f"no stacks: {error}"
    return f"{pid} is still there ({state}; {stacks})"


def _start_ticks(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


@contextmanager
def cluster(folder: Path, **settings: Any) -> Iterator[Cluster]:
    """A cluster for the block."""
    made = Cluster(folder, **settings)
    try:
        yield made
    finally:
        made.close()
