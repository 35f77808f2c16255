"""A Slurm cluster of the test's own: munge, slurmctld and some slurmd, each on a host of its own network.

Every daemon's files are in one temporary folder, so nothing of the machine's own Slurm is read or changed. The last
host has slurmctld, as a login node would; the others are the nodes. All share the machine's file systems.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.needs import missing
from support.netns import Host, Network, network

__all__ = ["Cluster", "cluster"]

_CONF = """
ClusterName=paceline
SlurmctldHost={ctl.name}({ctl.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=10
InactiveLimit=0
KillWait=15
MinJobAge=300
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""

_CORES = 4
"""Slurm believes that each node has so many: it checks no number that is in its file (config_overrides)."""

_STARTS_S = 20.0


class Cluster:
    """A running cluster.

    Attributes:
        network: its network.
        login: the host that has slurmctld; commands run there.
        nodes: the hosts that run jobs.
        folder: the daemons' files.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        *self.nodes, self.login = network.hosts
        self.folder = folder
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def run(self, *words: str, **environment: str) -> str:
        """Runs a command on the login host; returns what it printed."""
        done = subprocess.run(
            self.login.command(words),
            capture_output=True,
            text=True,
            timeout=30,
            env=self._environment | environment,
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, *words: str | Path, **environment: str) -> str:
        """Runs sbatch with these words, options first; returns the job's number."""
        return self.run("sbatch", "--parsable", *map(str, words), **environment).strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says, by its names."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job: str, *states: str, timeout: float = 30.0) -> dict[str, str]:
        """Waits until a job is in one of these states."""
        deadline = time.monotonic() + timeout
        while (found := self.job(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {job} is {found['JobState']}, not {states}\n{self.logs()}"
            time.sleep(0.1)
        return found

    def logs(self) -> str:
        """The last lines of all logs."""
        parts = [f"--- {log.name}\n" + log.read_text()[-1500:] for log in sorted(self.folder.glob("*.log"))]
        return "\n".join(parts)

    def start(self) -> None:
        """Starts the daemons, and waits until all nodes are idle."""
        folder, hosts = self.folder, self.folder / "hosts"
        folder.chmod(0o755)
        hosts.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in self.network.hosts)
        )
        (folder / "state").mkdir()
        for host in self.network.hosts:
            host.etc["hosts"] = hosts
        nodes = "\n".join(
            f"NodeName={host.name} NodeAddr={host.address} CPUs={_CORES} RealMemory=1000 State=UNKNOWN"
            for host in self.nodes
        )
        conf = _CONF.format(ctl=self.login, folder=folder, nodes=nodes) + "SlurmdParameters=config_overrides\n"
        (folder / "slurm.conf").write_text(conf)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # a network namespace hides /sys/fs/cgroup
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("pid-file", "log-file", "seed-file")]
        self._start(["munged", "--foreground", f"--key-file={key}", f"--socket={folder}/munge.socket", *munge])
        self._wait(lambda: (folder / "munge.socket").exists(), "munged listens")
        self._start(self.login.command(["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")]))
        for node in self.nodes:
            self.start_node(node)
        self._wait(self._all_idle, "all nodes are idle")

    def start_node(self, node: Host) -> None:
        """Starts a node's slurmd."""
        self._start(node.command(["slurmd", "-D", "-f", str(self.folder / "slurm.conf")]))

    def wait_until_idle(self) -> None:
        """Waits until all nodes are idle: nothing of a test is left for the next one."""
        self._wait(self._all_idle, "all nodes are idle")

    @contextmanager
    def started(self, words: list[str]) -> Iterator[None]:
        """Runs a command on the login host for the block."""
        with (self.folder / "login.log").open("ab") as log:
            process = subprocess.Popen(
                self.login.command(words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )
        try:
            yield
        finally:
            process.terminate()
            process.wait(10)

    def _all_idle(self) -> bool:
        done = subprocess.run(
            self.login.command(["sinfo", "--noheader", "--partition=low", "--format=%T %D"]),
            capture_output=True,
            text=True,
            env=self._environment,
            timeout=30,
        )
        return done.stdout.split() == ["idle", str(len(self.nodes))]

    def _start(self, command: list[str]) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment)
            )

    def _wait(self, done: object, what: str) -> None:
        assert callable(done)
        deadline = time.monotonic() + _STARTS_S
        while not done():
            assert time.monotonic() < deadline, f"not within {_STARTS_S:g} s: {what}\n{self.logs()}"
            time.sleep(0.05)

    def close(self) -> None:
        """Kills the daemons; the network ends all that runs on its hosts."""
        for host in self.network.hosts:
            host.kill()
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()


@contextmanager
def cluster(nodes: int) -> Iterator[Cluster]:
    """A cluster of so many nodes for the block; skips the test, or fails it, where Slurm is missing."""
    absent = [tool for tool in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(tool) is None]
    if absent:
        missing("slurm", f"{' and '.join(absent)} missing (apt-get install slurmctld slurmd slurm-client munge)")
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-slurm-", ignore_cleanup_errors=True))
        )
        made = Cluster(stack.enter_context(network(nodes + 1)), folder)
        stack.callback(made.close)
        made.start()
        yield made
