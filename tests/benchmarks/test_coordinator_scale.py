"""The figures that the coordinator must hold at 1,000 members: the median of three runs."""

from __future__ import annotations

import statistics

import pytest
from benchmarks import coordinator_scale

LIMITS = {
    "view_and_members_after_last_connect_s": 2.0,
    "barrier_round_s_p50": 0.25,
    "rss_per_session_after_rounds_kib": 100.0,
    "kill_seen_ms_p50": 10.0,
}


@pytest.mark.benchmark
@pytest.mark.timeout(180)
def test_a_thousand_sessions() -> None:
    runs = [coordinator_scale.measure() for _ in range(3)]
    figures = {name: statistics.median(run[name] for run in runs) for name in LIMITS}
    print(f"\n1,000 sessions, median of {len(runs)} runs: {figures}")
    assert {name: figure for name, figure in figures.items() if figure > LIMITS[name]} == {}
