"""What workers tell, folded into the state of the run."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from rich.console import Console

from paceline.cli.launcher.outcome import Exit
from paceline.demo.command import as_result
from paceline.demo.progress import Progress, sparkline
from paceline.demo.view import picture


def view(rank: int, generation: int = 1) -> dict[str, Any]:
    return {"kind": "view", "rank": rank, "world_size": 2, "generation": generation}


def step(step: int, **facts: Any) -> dict[str, Any]:
    return {"kind": "step", "step": step, "total": 10, "samples": 5 * step, "rate": 2.0, "bytes_sent": 100} | facts


RESULT = {
    "kind": "result",
    "accuracy": 0.97219,
    "steps": 10,
    "samples_once": True,
    "seconds": 1.23456,
    "world_size": 2,
}


def a_run() -> Progress:
    progress = Progress()
    progress.told(0, 100, view(1))
    progress.told(1, 101, view(0))
    progress.told(0, 100, step(4))
    progress.told(1, 101, step(5, rate=4.0, bytes_sent=50))
    progress.told(1, 101, {"kind": "epoch", "epoch": 1, "of": 3, "loss": 0.5, "accuracy": 0.9})
    return progress


def test_the_line_is_where_its_last_worker_is() -> None:
    progress = a_run()
    assert (progress.step, progress.total, progress.rate, progress.bytes_sent) == (4, 10, 3.0, 150)
    assert (progress.losses, progress.accuracy) == ([0.5], 0.9)
    assert [(row.rank, row.state, row.samples) for row in progress.rows.values()] == [
        (1, "training", 20),
        (0, "training", 25),
    ]


def test_ends_show() -> None:
    progress = a_run()
    progress.ended(0, Exit("rank 1", 100, 0))
    progress.ended(1, Exit("rank 0", 101, -9))
    assert [row.state for row in progress.rows.values()] == ["done", "killed"]


def test_the_result_has_the_contract_s_names() -> None:
    progress = a_run()
    progress.told(1, 101, RESULT)
    assert as_result(progress) == {
        "accuracy": 0.9722,
        "steps": 10,
        "world_size": 2,
        "generations": 1,
        "recoveries": [],
        "samples_once": True,
        "seconds": 1.235,
    }


def test_records_of_other_kinds_are_left_alone() -> None:
    progress = a_run()
    progress.told(0, 100, {"kind": "weather", "sun": True})
    assert progress.step == 4


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"kind": "view"},
        {"kind": ["view"]},
        view(-1),
        view(True),
        {"kind": "step", "step": 4},
        step(5, samples=10**400),
        step(5, rate="fast"),
        {"kind": "epoch", "of": 3, "loss": None, "accuracy": 0.9},
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
    for word in ("step 4/10", "90.00% of the held-back fifth", "150 bytes", "100", "101", "training", "0.5000"):
        assert word in text
    assert all(len(line) <= 100 for line in text.splitlines())


def test_the_picture_of_nothing_yet() -> None:
    console = Console(width=100, file=io.StringIO())
    console.print(picture(Progress(), console))
