"""Measures how fast checkpoints are written beside dd on the same disk, and what training pays; `-s` prints figures."""

from __future__ import annotations

import shutil
import statistics
import subprocess
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from paceline import checkpoint
from paceline.checkpoint import Tag
from paceline.checkpoint.folder import discard, open_folder
from paceline.checkpoint.pieces import pieces_of
from paceline.checkpoint.writing import PartWriter
from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20


def state(size: int) -> dict[str, np.ndarray]:
    """Makes arrays of 16 MiB that no disk can compress."""
    rng = np.random.default_rng(0)
    return {f"layer{n}": rng.standard_normal(2 * MIB) for n in range(size // (16 * MIB))}


def dd(path: Path, size: int) -> float:
    """Returns the seconds that `dd bs=4M conv=fdatasync` takes."""
    start = perf_counter()
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={size // (4 * MIB)}", "conv=fdatasync"]
    subprocess.run(command, check=True, capture_output=True)
    return perf_counter() - start


def test_save_reaches_80_percent_of_the_rate_of_dd(tmp_path: Path) -> None:
    """Alternates with dd at 512 MiB; measures all of `save`: files, manifest, every sync and rename."""
    size = 512 * MIB
    saved, times = state(size), []
    for step in range(1, 12):
        plain = dd(tmp_path / "dd", size)
        (tmp_path / "dd").unlink()
        start = perf_counter()
        folder = checkpoint.save(tmp_path / "runs", saved, (1, step), keep=1)
        times.append((plain, perf_counter() - start))
        shutil.rmtree(folder)  # so that neither pays for removing the previous one
    rates = [statistics.median(size / seconds / 1e6 for seconds in column) for column in zip(*times, strict=True)]
    share = statistics.median(plain / ours for plain, ours in times)
    print(f"\nsave {rates[1]:.0f} MB/s, dd {rates[0]:.0f} MB/s; paired {share:.2f}")
    assert share >= 0.8


def test_training_stalls_for_at_most_a_twentieth_of_the_write(tmp_path: Path) -> None:
    """Each step computes for 0.15 s in one thread, then changes all 256 MiB of state after `wait_until_copied`."""
    arrays = state(256 * MIB)
    a = np.ones(1 << 15)

    def compute(seconds: float = 0.15) -> float:
        """Computes for so many seconds; returns the repetitions per second."""
        start, count = perf_counter(), 0
        while perf_counter() - start < seconds:
            np.tanh(a)
            count += 1
        return count / (perf_counter() - start)

    writer, shares, stalls, slower = PartWriter(), [], [], []
    for step in range(1, 10):
        tag = Tag(1, step)
        alone = compute()
        open_folder(tmp_path, tag, "a")
        start = perf_counter()
        writer.begin(tmp_path, tag, "a", 0, 1, pieces_of(arrays, 0, 1))
        stall = perf_counter() - start
        beside = compute()
        before = perf_counter()
        writer.wait_until_copied()
        stall += perf_counter() - before
        for array in arrays.values():
            array += 1
        while writer.is_writing:
            compute(0.001)
        written = perf_counter() - start
        writer.wait()
        discard(tmp_path, tag, "a")
        if step > 1:  # the first step allocates the memory for the copy
            stalls.append(stall)
            shares.append(stall / written)
            slower.append(alone / beside - 1)
    print(
        f"\nstall {statistics.median(stalls) * 1e3:.2f} ms, {statistics.median(shares):.2%} of the time of the write; "
        f"computation meanwhile {statistics.median(slower):.0%} slower"
    )
    assert statistics.median(shares) <= 0.05


def test_a_sharded_write_stalls_training_for_at_most_a_twentieth() -> None:
    """W=2, 256 MiB each: measures all of `ShardedSaver` in the training thread, with folders, words and publishing."""
    code = """
import tempfile, time
from paceline import checkpoint
from paceline.checkpoint.pieces import Shard

a = np.ones(1 << 15)
def compute(seconds):
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        np.tanh(a)

with paceline.join() as session, tempfile.TemporaryDirectory() as own:
    group = session.group
    saver = checkpoint.ShardedSaver(group.broadcast_object(own), group)
    n = 32 << 20
    state = {"w": Shard(np.random.default_rng(group.rank).standard_normal(n), group.rank * n, (2 * n,), 0, 1)}
    found = []
    for step in range(1, 7):
        group.barrier()
        start = time.perf_counter()
        saver.begin(state, (1, step))
        stall = time.perf_counter() - start
        compute(0.15)
        before = time.perf_counter()
        saver.wait_until_copied()
        stall += time.perf_counter() - before
        while group.all_reduce(np.array([saver.is_writing], float))[0]:  # as the step word does
            compute(0.005)
        before = time.perf_counter()
        saver.finish()
        stall += time.perf_counter() - before
        found.append((stall, time.perf_counter() - start))
    emit("facts", found=found)
    group.barrier()
"""
    with coordinator() as address, workers(2, code, COORDINATOR=address, MIN_WORKERS="2") as started:
        found = [worker.expect("facts", timeout=120.0)["found"][1:] for worker in started]
        assert [worker.wait() for worker in started] == [0, 0]
    for rank in found:
        stall, whole = (statistics.median(column) for column in zip(*rank, strict=True))
        share = statistics.median(a / b for a, b in rank)
        print(f"\nstall {stall * 1e3:.1f} ms of {whole * 1e3:.0f} ms, {share:.2%}")
        assert share <= 0.05
