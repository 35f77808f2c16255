"""torchtitan's Llama-3 debug model in replicas: a rank is killed, and losses are those of an undisturbed run."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.command import Command, command

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.exhaustive,  # torchtitan is where the newest torch is
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

HERE = Path(__file__).parent
SCRIPT = str(HERE.parents[2] / "examples" / "torchtitan" / "on_cpu.py")
TP = ("--parallelism.tensor_parallel_degree", "2")  # in place of FSDP 2
SAME_BITS = ("--microbatches", "4")


@contextmanager
def train(replicas: int, steps: int, *options: str, restarts: int = 0, alone_s: float = 0.0) -> Iterator[Command]:
    """Runs replicas of two ranks, of which one is enough; a replica that is alone waits after each step."""
    launch = ("-n", str(2 * replicas), "--replica-size", "2", "--min", "1", "--restarts", str(restarts))
    batches = ("--training.local_batch_size", "2", "--training.global_batch_size", "8")
    model = ("--module", "titan_losses", "--config", "debugmodel", "--training.steps", str(steps))
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "ALONE_S": str(alone_s), "PACELINE_FAILURE_TIMEOUT": "20"}  # they import slowly
    with command("run", *launch, SCRIPT, *model, *batches, *options, **environment) as run:
        yield run


def losses(run: Command, timeout: float, steps: int) -> list[float]:
    """Waits for the end; returns the loss of each step, on which all ranks that have printed it agree."""
    assert run.wait(timeout) == 0, str(run)
    found = dict(re.findall(r"step (\d+): (\S+) by", run.stdout))
    printed = {*re.findall(r"step (\d+): (\S+) by", run.stdout)}
    assert len(printed) == len(found) == steps, sorted(printed, key=lambda each: int(each[0]))
    return [float.fromhex(found[str(step)]) for step in range(1, steps + 1)]


@functools.cache
def undisturbed(steps: int, *options: str) -> list[float]:
    """The losses of one replica that loses nobody."""
    with train(1, steps, *options) as run:
        return losses(run, 10.0 * steps, steps)


def kill(run: Command, at: str) -> None:
    """Kills a rank as soon as it has printed the loss of a step."""
    run.wait_for(at, timeout=150.0)
    os.kill(int(re.findall(rf"{re.escape(at)}\S+ by pid (\d+)", run.stdout)[0]), signal.SIGKILL)


@pytest.mark.newest
def test_a_replica_dies_and_comes_back_and_the_losses_have_the_bits_of_an_undisturbed_run() -> None:
    steps = 8
    with train(2, steps, *SAME_BITS, restarts=1, alone_s=10.0) as run:
        kill(run, "[1.1] step 3: ")
        disturbed = losses(run, 300.0, steps)
    assert run.stderr.count("as a whole") == 1, str(run)
    assert len({*re.findall(r"by pid (\d+)", run.stdout)}) == 6, str(run)  # both ranks of the replica came back
    assert disturbed == undisturbed(steps, *SAME_BITS)
    assert disturbed[-1] < 0.8 * disturbed[0]


def test_a_tensor_parallel_replica_dies_and_the_losses_are_those_of_an_undisturbed_run() -> None:
    steps = 6
    with train(2, steps, *TP) as run:
        kill(run, "[1.0] step 3: ")
        disturbed = losses(run, 200.0, steps)
    assert disturbed == pytest.approx(undisturbed(steps, *TP), rel=1e-5)
    assert disturbed[-1] < 0.8 * disturbed[0]


def replicas_of(run: Command) -> list[set[int]]:
    """The processes of each replica that has all of its ranks."""
    found = defaultdict(set)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == run.process.pid:
                port = re.search(rb"MASTER_PORT=(\d+)", (folder / "environ").read_bytes())
                found[port and port[1]].add(int(folder.name))
    return [pids for pids in found.values() if len(pids) == 2]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bits", [False, True], ids=["rounded", "bits"])
@pytest.mark.parametrize("inside", [(), TP], ids=["fsdp", "tp"])
@pytest.mark.parametrize("replicas", [2, 3])
def test_any_process_is_killed_every_five_seconds_and_losses_are_those_of_an_undisturbed_run(
    replicas: int, inside: tuple[str, ...], bits: bool
) -> None:
    """For two minutes; the last replica that holds the state is left alone, and mostly those that start then."""
    steps, kills, chance, seen = 80, 0, random.Random(replicas), set[int]()
    options = (*inside, *(SAME_BITS if bits else ()))
    with train(replicas, steps, *options, restarts=100) as run:
        run.wait_for("step 2: ", timeout=150.0)
        until = time.monotonic() + 120.0
        while time.monotonic() < until and run.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(5.0)
            trained = {int(pid) for pid in re.findall(r"by pid (\d+)", run.stdout)}
            present = replicas_of(run)
            holders = [pids for pids in present if pids <= trained]
            alive = {pid for pids in present for pid in pids}
            victim = chance.choice(sorted(alive & seen) or [0])  # the launcher gives up what fails at once
            seen = alive
            alone = len(holders) == 1 and (victim in holders[0] or chance.random() < 0.8)
            if victim and holders and not alone:
                os.kill(victim, signal.SIGKILL)
                kills += 1
        disturbed = losses(run, 2000.0, steps)
    restarts, ranks = run.stderr.count("as a whole"), len({*re.findall(r"by pid (\d+)", run.stdout)})
    apart = max(abs(a / b - 1) for a, b in zip(disturbed, undisturbed(steps, *inside, *SAME_BITS), strict=True))
    sys.stdout.write(f"{kills} kills, {restarts} restarts, {ranks} processes trained, {steps} steps; ")
    sys.stdout.write(f"losses differ by {apart:.2g} of themselves at most\n")
    assert kills > 2  # a replica takes half a minute to come back on a busy machine
    assert ranks > 2 * replicas
    assert apart <= (0 if bits else 1e-2)
