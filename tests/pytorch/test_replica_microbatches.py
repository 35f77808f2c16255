"""In microbatches the bits of a run with FSDP2 inside follow from the size of a replica, not from their number.

Nor do they follow from where a run was interrupted, if it goes on from a checkpoint.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from pytorch.soak_replicas import soak_replicas

from paceline import checkpoint
from paceline.checkpoint.folder import read_manifest
from support.command import command

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(180)]

SCRIPT = str(Path(__file__).parent / "replica_microbatches.py")
SLOWLY = ("--pace", "0.1")


def digests(replicas: int, said: str, ranks: int = 2) -> set[str]:
    """The digests that all ranks of these replicas print."""
    found = re.findall(rf"{replicas} replicas of {ranks}: (\w+)", said)
    assert len(found) == replicas * ranks, said
    return set(found)


FAKE_DEVICE = str(Path(__file__).parent / "fake_device.py")


def train(replicas: int, ranks: int, *arguments: object) -> str:
    """Returns everything that was said."""
    with command("run", "-n", str(replicas * ranks), "--replica-size", str(ranks), SCRIPT, *map(str, arguments)) as run:
        assert run.wait(150.0) == 0, str(run)
    return run.stdout + run.stderr


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The digest of one replica of two ranks that trains to the end."""
    (digest,) = digests(1, train(1, 2))
    return digest


@pytest.mark.exhaustive  # the tests with checkpoints and kills show it too
def test_one_and_two_replicas_end_with_the_same_bits(undisturbed: str) -> None:
    assert digests(2, train(2, 2)) == {undisturbed}


@pytest.mark.exhaustive
def test_fsdp2_that_keeps_weights_on_two_of_four_ranks_trains_in_replicas() -> None:
    assert digests(1, train(1, 4, "--reshard", 2), 4) == digests(2, train(2, 4, "--reshard", 2), 4)


def test_replicas_go_on_from_the_checkpoints_of_another_number(tmp_path: Path, undisturbed: str) -> None:
    """Two replicas leave, one goes on; then the last checkpoint is damaged, and two use the one before."""
    folder = tmp_path / "saved"
    with command("run", "-n", "4", "--replica-size", "2", SCRIPT, *SLOWLY, "--checkpoints", str(folder)) as run:
        run.wait_for("step 4 of replica 0", timeout=90.0)
        run.signal(signal.SIGTERM)
        run.wait(60.0)
    last = checkpoint.tags(folder)[-1]
    assert 4 <= last.step < 12, str(run)
    said = train(1, 2, "--checkpoints", folder)
    assert digests(1, said) == {undisturbed}, said
    assert f"resumed from step {last.step} of checkpoint" in said, said

    before, last = checkpoint.tags(folder)
    assert last.step == 12
    data = folder / str(last) / "__1_0.distcp"
    flipped = bytearray(data.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    data.write_bytes(flipped)
    said = train(2, 2, "--checkpoints", folder)
    assert digests(2, said) == {undisturbed}, said
    assert f"{last} is left out: {data} has other bytes than were written" in said, said
    assert f"resumed from step {before.step} of checkpoint" in said, said


def test_a_rank_that_is_killed_while_it_writes_costs_neither_bits_nor_checkpoints(
    tmp_path: Path, undisturbed: str
) -> None:
    """The other replica trains on, and writes from then on."""
    folder = tmp_path / "saved"
    options = ("-n", "4", "--replica-size", "2", "--restarts", "1", "--min", "1")
    with command("run", *options, SCRIPT, *SLOWLY, "--checkpoints", str(folder), "--strike", "7") as run:
        assert run.wait(150.0) == 0, str(run)
    assert (tmp_path / "saved-struck").exists()
    assert set(re.findall(r"\d replicas of 2: (\w+)", run.stdout)) == {undisturbed}, str(run)
    tags = checkpoint.tags(folder)
    assert tags[-1].step == 12
    for tag in tags:
        for file in read_manifest(folder / str(tag)).files:
            file.verify(folder / str(tag))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_storm_of_40_seconds_keeps_the_bits(tmp_path: Path) -> None:
    soak_replicas(40, 1, tmp_path, print)


def test_replicas_on_a_device_have_the_bits_of_the_cpu_through_a_kill(tmp_path: Path, undisturbed: str) -> None:
    """One replica loses a rank right after a checkpoint, comes back, and takes its state from the other one."""
    settings = ("--checkpoints", str(tmp_path / "saved"), "--strike", "4", "--awaits", "--pace", "0.5")
    bounds = ("-n", "4", "--replica-size", "2", "--min", "1", "--restarts", "3")
    with command("run", *bounds, FAKE_DEVICE, SCRIPT, *settings) as run:
        assert run.wait(150.0) == 0, str(run)
    assert digests(2, run.stdout) == {undisturbed}, str(run)
    assert "was killed by SIGKILL) as a whole" in run.stderr, str(run)
