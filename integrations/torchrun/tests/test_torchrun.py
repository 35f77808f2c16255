"""Real torchruns that meet at a coordinator: nodes fail, come, go, and restart their workers as torchrun does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.process_coordinator import coordinator_process
from paceline.testing import coordinator
from support.certificates import make_folder
from support.command import Command, wait_until_gone

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(180)]

BOTH = """
    import os
    import numpy as np
    import torch
    import torch.distributed as dist
    import paceline

    dist.init_process_group("paceline")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((1,), rank + 1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    with paceline.join() as session:
        assert (session.rank, session.size) == (rank, size)
        y = session.group.all_reduce(np.array([rank + 1]))
    assert {rank, size} == {int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])}
    os.write(1, f"rank {rank} of {size} sums {x.item()} {y.item()}\\n".encode())
"""

WAIT = """
    import os, signal
    rank, size, restart, job = (
        os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "PACELINE_JOB")
    )
    os.write(1, f"rank {rank} of {size} restart {restart} job {job} pid {os.getpid()}\\n".encode())
    signal.pause()
"""

LOOP = """
    import os
    import numpy as np
    import paceline

    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    with paceline.join() as session:
        os.write(1, f"rank {rank} of {session.size} restart {restart} pid {os.getpid()}\\n".encode())
        while True:
            total = session.group.all_reduce(np.ones(1, np.int64))
"""


@contextlib.contextmanager
def torchrun(place: str, script: Path, *flags: str, **environment: str) -> Iterator[Command]:
    """A torchrun with our rendezvous; it is killed at the end of the block, with its workers."""
    arguments = ("--rdzv-backend", "paceline", "--rdzv-endpoint", place, *flags, str(script))
    running = Command(arguments, {"OMP_NUM_THREADS": "1", **environment}, program=("-m", "torch.distributed.run"))
    try:
        yield running
    finally:
        running.process.kill()
        for pid in pids(running):  # they outlive it, and keep its pipes open
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.close()


def pids(*runs: Command) -> list[int]:
    """The workers that have said which they are."""
    return [int(pid) for run in runs for pid in re.findall(r" pid (\d+)$", run.stdout, re.MULTILINE)]


@pytest.fixture
def place() -> Iterator[str]:
    with coordinator() as address:
        yield address


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def write(script: Path, code: str) -> Path:
    script.write_text(textwrap.dedent(code))
    return script


@pytest.mark.newest
def test_workers_of_one_node_sum_with_torch_and_paceline(place: str, script: Path) -> None:
    with torchrun(place, write(script, BOTH), "--nproc-per-node", "4") as run:
        assert run.wait(120) == 0, str(run)
    assert sorted(run.stdout.splitlines()) == [f"rank {rank} of 4 sums 10 10" for rank in range(4)]


@pytest.mark.newest
def test_two_nodes_sum_with_a_token_and_certificates(script: Path, tmp_path: Path) -> None:
    """The token is good for the run's job only."""
    certificates = make_folder(tmp_path / "certificates")
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("0123456789abcdef0123456789abcdef digits\n")
    own = {**certificates.environment, "PACELINE_TOKEN": "0123456789abcdef0123456789abcdef"}
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-id", "digits")
    write(script, BOTH)
    with (
        coordinator(token_file=tokens, **certificates.server()) as place,
        torchrun(place, script, *flags, **own) as one,
        torchrun(place, script, *flags, **own) as two,
    ):
        assert (one.wait(120), two.wait(120)) == (0, 0), f"{one}{two}"
    assert sorted((one.stdout + two.stdout).splitlines()) == [f"rank {rank} of 4 sums 10 10" for rank in range(4)]


def test_a_node_without_a_token_is_refused_with_a_hint(script: Path) -> None:
    with coordinator(token="0123456789abcdef0123456789abcdef") as place, torchrun(place, write(script, WAIT)) as run:
        assert run.wait(60) == 1
    assert "RendezvousConnectionError" in run.stderr
    assert "it wants a token: set PACELINE_TOKEN" in run.stderr


@pytest.mark.newest
def test_all_workers_restart_when_one_dies(place: str, script: Path) -> None:
    flags = ("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1")
    write(script, LOOP)
    with torchrun(place, script, *flags) as one, torchrun(place, script, *flags) as two:
        for run in (one, two):
            run.wait_for("of 4 restart 0", 2, timeout=60)
        first = pids(one, two)
        os.kill(pids(two)[0], signal.SIGKILL)
        two.wait_for("of 4 restart 1", 2, timeout=60)
        one.wait_for("of 4 restart", 4, timeout=60)
        wait_until_gone(first)


def test_nodes_join_and_leave_without_counting_as_restarts(place: str, script: Path) -> None:
    """An agent is killed, and another told to end; neither counts as a restart."""
    flags = ("--nnodes", "1:3", "--rdzv-conf", "last_call_timeout=1")
    write(script, WAIT)
    with torchrun(place, script, *flags) as one:
        one.wait_for("rank 0 of 1 restart 0", timeout=60)
        with torchrun(place, script, *flags) as two, torchrun(place, script, *flags) as three:
            for run in (one, two, three):
                run.wait_for("of 3 restart 0", timeout=60)
            three.signal(signal.SIGKILL)
            for run in (one, two):
                run.wait_for("of 2 restart 0", timeout=30)
            two.signal(signal.SIGTERM)
            one.wait_for("rank 0 of 1 restart 0", 2, timeout=30)


def test_rounds_survive_a_restart_of_the_coordinator(script: Path, tmp_path: Path) -> None:
    """Rounds outlive it: workers run on, and the next round gets a greater number."""
    flags = ("--nnodes", "2", "--max-restarts", "1")
    write(script, WAIT)
    with (
        coordinator_process(tmp_path) as place,
        torchrun(place.address, script, *flags) as one,
        torchrun(place.address, script, *flags) as two,
    ):
        for run in (one, two):
            run.wait_for("of 2 restart 0 job none/1", timeout=60)
        place.kill()
        place.start()
        os.kill(pids(one)[0], signal.SIGKILL)
        one.wait_for("of 2 restart 1 job none/2", timeout=60)
        two.wait_for("of 2 restart 0 job none/2", timeout=60)
        assert len(pids(one, two)) == 4


def test_node_that_fails_for_good_ends_the_others(place: str, script: Path) -> None:
    write(script, WAIT)
    with torchrun(place, script, "--nnodes", "2") as one, torchrun(place, script, "--nnodes", "2") as two:
        for run in (one, two):
            run.wait_for("of 2 restart 0", timeout=60)
        os.kill(pids(one)[0], signal.SIGKILL)
        assert (one.wait(60), two.wait(60)) == (1, 1), f"{one}{two}"
        assert "RendezvousClosedError: run 'none' was closed by another node" in two.stderr
        wait_until_gone(pids(one, two))
