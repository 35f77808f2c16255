"""What workers tell, folded into the state of the run."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.demo import as_result, faults, picture
from paceline.demo.progress import DemoProgress, Stage, sparkline


def view(rank: int) -> dict[str, Any]:
    return {"kind": "view", "rank": rank, "world_size": 2, "generation": 1}


def share(step: int, samples: Any) -> dict[str, Any]:
    return {"kind": "share", "step": step, "generation": 2, "samples": samples}


def applied(step: int, **facts: Any) -> dict[str, Any]:
    told = {"kind": "applied", "step": step, "generation": 2, "loss": 0.5, "samples": 1, "bytes_sent": 100, "at": 7.0}
    return told | facts


PLAN = {"kind": "plan", "samples": 2, "steps_per_epoch": 1, "total": 2}

RESULT = {"kind": "result", "accuracy": 0.97219, "steps": 2, "seconds": 1.23456, "world_size": 2}


def a_run() -> DemoProgress:
    """Two workers in the first of two steps, each of which is an epoch."""
    progress = DemoProgress()
    for index, pid in ((0, 100), (1, 101)):
        progress.told(index, pid, view(1 - index))
        progress.told(index, pid, PLAN)
        progress.told(index, pid, share(1, [index]))
        progress.told(index, pid, applied(1, bytes_sent=50 + 50 * index))
    progress.told(1, 101, {"kind": "epoch", "epoch": 1, "accuracy": 0.9})
    return progress


def test_a_run_so_far() -> None:
    progress = a_run()
    assert (progress.step, progress.total, progress.epochs, progress.bytes_sent) == (1, 2, 2, 150)
    assert (progress.losses, progress.accuracy) == ([0.5], 0.9)
    assert [(row.rank, row.state, row.samples) for row in progress.rows.values()] == [
        (1, "training", 1),
        (0, "training", 1),
    ]


def test_the_rate_is_that_of_a_while() -> None:
    progress = a_run()
    for step, at in ((2, 7.1), (3, 7.2), (9, 8.0)):
        progress.told(0, 100, applied(step, at=at))
    assert progress.rate == pytest.approx(8.0)


def test_bytes_of_earlier_generations_are_kept() -> None:
    progress = a_run()
    progress.told(0, 100, applied(2, bytes_sent=10))
    progress.told(0, 100, applied(3, bytes_sent=30))
    assert progress.bytes_sent == 50 + 30 + 100


def test_ends_show() -> None:
    progress = a_run()
    progress.ended(0, 100, 0)
    progress.ended(1, 101, -9)
    assert [row.state for row in progress.rows.values()] == ["done", "killed"]


def finished() -> DemoProgress:
    progress = a_run()
    progress.told(0, 100, share(2, [1, 0]))
    progress.told(0, 100, applied(2, generation=2))
    progress.told(1, 101, RESULT)
    return progress


def test_the_result_has_the_contract_s_names() -> None:
    assert as_result(finished()) == {
        "accuracy": 0.9722,
        "steps": 2,
        "world_size": 2,
        "generations": 1,
        "recoveries": [],
        "samples_once": True,
        "seconds": 1.235,
    }


def test_only_a_worker_in_the_place_of_another_is_a_new_one() -> None:
    progress = finished()
    for index, pid in ((1, 101), (1, 102)):
        progress.told(index, pid, {"kind": "joined", "began": 5.0, "at": 6.0})
        progress.told(index, pid, applied(2, at=7.0))
    assert as_result(progress)["recoveries"] == [{"cause": "joined", "detect_ms": 1000.0, "recover_ms": 1000.0}]
    assert len(progress.rows) == 3


def test_what_is_not_as_it_should_be_is_said() -> None:
    good = as_result(finished())
    assert faults(good, kill=False) == []
    assert len(faults(good, kill=True)) == 2  # nobody was killed, and nobody came
    assert "below 95%" in faults(good | {"accuracy": 0.9}, kill=False)[0]
    assert "exactly once" in faults(good | {"samples_once": False}, kill=False)[0]
    both = good | {"recoveries": [{"cause": "killed"}, {"cause": "joined"}]}
    assert faults(both, kill=True) == []


def test_records_of_other_kinds_are_left_alone() -> None:
    progress = a_run()
    progress.told(0, 100, {"kind": "weather", "sun": True})
    assert progress == a_run()


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"kind": "view"},
        {"kind": ["view"]},
        view(-1),
        view(True),
        {"kind": "plan", "samples": 2.0, "steps_per_epoch": 1, "total": 2},
        {"kind": "share", "step": 4},
        share(2, [-1]),
        share(2, ["a"]),
        {"kind": "applied", "step": 4},
        applied(5, bytes_sent=10**400),
        applied(5, at="soon"),
        applied(5, at=math.nan),
        {"kind": "epoch", "epoch": 1, "accuracy": None},
        {"kind": "joined", "began": math.inf, "at": 1.0},
        {"kind": "killing", "rank": 3, "at": 1.0},
        {"kind": "formed", "generation": -1, "world": 2, "at": 1.0},
        {"kind": "result", "accuracy": 0.9},
        RESULT | {"seconds": 0.0},
    ],
)
def test_records_that_are_not_as_the_demo_says_them_are_left_alone(record: dict[str, Any]) -> None:
    progress = a_run()
    progress.told(0, 100, record)
    assert progress == a_run()


def test_sparkline() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([9, 9, 0, 7], 2) == "▁█"
    assert sparkline([0, 7], 8, unicode=False) == "_#"


def test_a_run_that_diverges_can_be_shown() -> None:
    assert sparkline([math.nan], 8) == "?"
    assert sparkline([1.0, 2.0, math.inf, math.nan, -math.inf], 8) == "▅▅█?▁"
    assert sparkline([-1.7e308, 1.7e308], 8) == "▁█"
    assert sparkline([0.0, 5e-324], 8) == "▁█"


def test_the_picture_shows_every_worker() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(picture(a_run(), console))
    text = console.export_text()
    for word in ("step 1/2", "90.00% of the held-back fifth", "150 bytes", "100", "101", "training", "0.5000"):
        assert word in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_picture_of_nothing_yet() -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(picture(DemoProgress(), console))


def test_before_the_first_step_it_says_what_is_waited_for() -> None:
    progress = DemoProgress()
    seen = [progress.waits_for]
    progress.expected = 2
    seen.append(progress.waits_for)
    for index in (0, 1):
        progress.told(index, 100 + index, {"kind": "ready", "at": 1.0})
        seen.append(progress.waits_for)
    progress.told(0, 100, {"kind": "view", "rank": 0, "pid": 100})
    seen.append(progress.waits_for)
    assert seen == [
        "starting the coordinator",
        "the workers load NumPy and the digits: 0 of 2 workers have done so",
        "the workers load NumPy and the digits: 1 of 2 workers have done so",
        "waiting for all to join: 0 of 2 workers are there",
        "waiting for all to join: 1 of 2 workers are there",
    ]
    where = {"step": 1, "generation": 1}
    progress.told(0, 100, {"kind": "applied", **where, "loss": 1.0, "samples": 1, "bytes_sent": 0, "at": 2.0})
    assert (progress.stage, progress.waits_for) == (Stage.TRAINS, "")


def test_the_picture_of_the_beginning_says_so_too() -> None:
    progress = DemoProgress(expected=4)
    console = Console(file=io.StringIO(), width=80)
    console.print(picture(progress, console))
    assert "0 of 4 workers have done so" in console.file.getvalue()  # type: ignore[attr-defined]
