"""The figures of issue 2 that the coordinator must hold."""

import importlib.util
from pathlib import Path

import pytest

LIMITS = {
    "view_and_members_after_last_connect_s": 2.0,
    "barrier_round_s_p50": 0.25,
    "rss_per_session_after_rounds_kib": 100.0,
    "kill_seen_ms_p50": 10.0,
}


@pytest.mark.benchmark
@pytest.mark.timeout(120)
def test_a_thousand_sessions() -> None:
    spec = importlib.util.spec_from_file_location("coordinator_scale", Path(__file__).with_name("coordinator_scale.py"))
    assert spec is not None
    assert spec.loader is not None
    scale = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scale)
    best: dict[str, float] = {}
    for _ in range(3):  # others may use the machine: what it can do is the best that it did
        for name, figure in scale.measure().items():
            best[name] = min(best.get(name, figure), figure)
        if all(best[name] <= limit for name, limit in LIMITS.items()):
            break
    print(best)
    assert {name: best[name] for name, limit in LIMITS.items() if best[name] > limit} == {}
