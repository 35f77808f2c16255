"""Checkpoints of a state that is spread, in real processes: damaged ones, and disks that are not shared."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from paceline import checkpoint
from paceline_protocol import Tag
from support.elastic.cluster import Cluster, cluster

pytestmark = pytest.mark.slow


def train_until_two_are_there(c: Cluster, runs: Path) -> list[Tag]:
    """Trains and is killed when two checkpoints are there; their tags."""
    with c.slowly():
        trainers = c.start(2)
        c.wait_until(lambda: len(checkpoint.tags(runs)) >= 2, "two checkpoints are there")
        for trainer in trainers:
            trainer.process.kill()
        c.wait()
    return checkpoint.tags(runs)


def test_a_damaged_checkpoint_is_left_out_by_all_ranks(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, total=60, wrapper="full_shard", pace=0.02, checkpoint_dir=str(runs),
                 checkpoint_every=2, log=True) as c:  # fmt: skip
        before, newest = train_until_two_are_there(c, runs)[-2:]
        (file,) = (runs / str(newest)).glob("arrays-00001*")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        resumed = c.start(2)
        assert sorted(c.wait().values()) == [-9, -9, 0, 0], str(c)
        c.check(count=2)
        assert all(trainer.of("attempt")[0]["step"] == before.step + 1 for trainer in resumed), str(c)
        assert f"checkpoint {newest} is left out" in "".join(trainer.stderr for trainer in resumed)


@pytest.mark.parametrize("wrapper", ["full_shard", "ddp"])
def test_ranks_agree_on_a_checkpoint_if_one_cannot_read_the_newest(wrapper: str, tmp_path: Path) -> None:
    """For that rank it is a loop of symbolic links. All use the one before, or that rank takes the state of the other.

    Each rank of a sharded state reads its part, and all of the same checkpoint.
    """
    runs, looped = tmp_path / "runs", tmp_path / "looped"
    with cluster(tmp_path, least=2, total=60, wrapper=wrapper, pace=0.02, checkpoint_dir=str(runs),
                 checkpoint_every=2, log=True) as c:  # fmt: skip
        before, newest = train_until_two_are_there(c, runs)[-2:]
        looped.mkdir()
        (looped / str(before)).symlink_to(runs / str(before))
        (looped / str(newest)).symlink_to(looped / str(newest))
        (sees,) = c.start(1)
        (other,) = c.start(1, checkpoint_dir=str(looped))
        c.wait_until(lambda: bool(other.of("attempt") and sees.of("attempt")), "both train")
        base = before if wrapper == "full_shard" else newest
        assert [trainer.of("attempt")[0]["step"] for trainer in (sees, other)] == [base.step + 1] * 2, str(c)
        trouble = f"{looped / str(newest) / 'manifest.json'} cannot be read: Too many levels of symbolic links"
        assert f"checkpoint {newest} is left out: {trouble}" in other.stderr


@pytest.mark.parametrize("files", ["arrays-*", "manifest.json"])
def test_resuming_from_only_damaged_checkpoints_raises(files: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, total=60, wrapper="full_shard", pace=0.02, checkpoint_dir=str(runs),
                 checkpoint_every=2) as c:  # fmt: skip
        for tag in train_until_two_are_there(c, runs):
            for file in (runs / str(tag)).glob(files):
                file.write_bytes(bytes(file.stat().st_size))
        resumed = c.start(2)
        assert sorted(c.wait().values())[:2] == [-9, -9], str(c)
        errors = [error for trainer in resumed for error in trainer.of("error")]
        assert "CheckpointDamaged" in {error["type"] for error in errors}, str(c)
        assert not any(trainer.of("attempt") for trainer in resumed), "nobody begins at step 0 as if there were none"


def test_a_rank_that_writes_to_another_disk_is_named(tmp_path: Path) -> None:
    with cluster(tmp_path, least=2, total=4, wrapper="full_shard", checkpoint_every=2) as c:
        for name in "ab":
            c.start(1, checkpoint_dir=str(tmp_path / name))
        assert set(c.wait().values()) == {3}, "the last state could not be kept"
        for trainer in c.trainers:
            assert [event["step"] for event in trainer.of("applied")] == [1, 2, 3, 4], "training does not end for it"
            (error,) = trainer.of("error")
            assert error["type"] == "CheckpointFailed"
            assert "rank 1 on" in error["text"]
            assert "must be on a disk that all ranks share" in error["text"]


def test_a_rank_that_reads_from_another_disk_raises_checkpoint_failed(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, total=60, wrapper="full_shard", pace=0.02, checkpoint_dir=str(runs),
                 checkpoint_every=2) as c:  # fmt: skip
        train_until_two_are_there(c, runs)
        (sees,) = c.start(1)
        (other,) = c.start(1, checkpoint_dir=str(tmp_path / "elsewhere"), visible_s=1.0)
        c.wait_until(lambda: bool(other.of("error")), "it ends")
        (error,) = other.of("error")
        assert error["type"] == "CheckpointFailed"
        assert "checkpoint_dir must lie on a disk that all workers share" in error["text"]
        c.start(1)
        c.wait()
        c.check(count=2)
        assert sees.of("done")


def test_a_checkpoint_that_appears_late_is_waited_for(tmp_path: Path) -> None:
    """As on a network file system, which shows what others have written when it asks again."""
    runs, late = tmp_path / "runs", tmp_path / "late"
    with cluster(tmp_path, least=2, total=60, wrapper="full_shard", pace=0.02, checkpoint_dir=str(runs),
                 checkpoint_every=2, log=True) as c:  # fmt: skip
        newest = train_until_two_are_there(c, runs)[-1]
        c.start(1)
        (other,) = c.start(1, checkpoint_dir=str(late))
        c.wait_until(lambda: "waiting up to 70 s" in other.stderr, "it waits")
        late.mkdir(exist_ok=True)
        for tag in checkpoint.tags(runs):  # whole at once, as when they were written
            shutil.copytree(runs / str(tag), tmp_path / "copy")
            (tmp_path / "copy").rename(late / str(tag))
        c.wait_until(lambda: bool(other.of("attempt")), "it has found it")
        assert other.of("attempt")[0]["step"] == newest.step + 1, str(c)
        log = (tmp_path / "coordinator.log").read_text()
        assert "is lost with" not in log, "what is merely said interrupts no wait"


def test_draining_all_members_by_sigterm_saves_the_last_step(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, total=500, wrapper="full_shard", pace=0.02, checkpoint_dir=str(runs)) as c:
        for trainer in c.start(2):
            c.wait_for_step(3)
            trainer.signal(signal.SIGTERM)
        assert set(c.wait().values()) == {0}, str(c)
        (kept,) = checkpoint.tags(runs)
        assert kept.step == max(event["step"] for trainer in c.trainers for event in trainer.of("applied"))
