"""Measures how soon a sharded state is resharded, between real processes. `-s` prints the figures."""

from __future__ import annotations

import os
import signal
import statistics

import pytest
from reshard_line import job, line

from paceline.testing import coordinator

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]


def test_draining_one_of_four_reshards_1_gb_within_2_s() -> None:
    """W=4 to W=3 with 1 GB, from the last commit to the next: notice, meeting, transfer, view and step word."""
    with coordinator() as address, job(address, 4) as started:
        for _, pipe in started:
            assert pipe.poll(60)
            assert pipe.recv() == "ready"
        *rest, (leaver, _) = started
        assert leaver.pid is not None
        os.kill(leaver.pid, signal.SIGTERM)
        leaver.join(30)
        assert leaver.exitcode == 0
        assert all(pipe.poll(30) for _, pipe in rest)
        took = max(pipe.recv() for _, pipe in rest)
    print(f"\n1 GB from W=4 to W=3, from the last commit to the first of three: {took:.2f} s")
    assert took <= 2.0


def test_three_of_four_fetch_their_missing_parts_within_2_s() -> None:
    """Measures the transfer alone: three members fetch what they lack of their new thirds, also from the fourth."""
    seconds = []
    with line(4) as (pipes, ports):
        for _ in range(5):
            for rank in range(3):
                pipes[rank].send(((rank, 3), True, ports))
            told = [pipes[rank].recv() for rank in range(3)]
            seconds.append(max(each for each, _ in told))
    moved = sum(wanted for _, wanted in told)
    took = statistics.median(seconds)
    print(
        f"\n1 GB from W=4 to W=3, fetching alone: {took:.2f} s ({min(seconds):.2f} to {max(seconds):.2f}), "
        f"{moved / 1e6:.0f} MB moved"
    )
    assert took <= 2.0


def test_a_shard_of_250_mb_is_fetched_within_0_6_s() -> None:
    """A newcomer fetches a dead member's shard of 250 MB from the only member that holds it."""
    seconds = []
    with line(4) as (pipes, ports):
        for _ in range(5):
            pipes[0].send(((1, 4), False, {1: ports[1]}))
            seconds.append(pipes[0].recv()[0])
    took = statistics.median(seconds)
    print(f"\n250 MB from one member: {took:.2f} s, {0.25 / took:.2f} GB/s")
    assert took <= 0.6
