"""Workers that run, and without which the job goes on. Time is an argument."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any

from paceline.cli.launcher.left_behind import HUNG_S, TELL_S, LeftBehind
from paceline.cli.launcher.worker import ReportedView, Worker

PID = 77


def a_worker(*records: dict[str, Any]) -> Worker:
    """A worker without a process, which has reported these records."""
    worker = object.__new__(Worker)
    worker.index, worker.rank, worker.view = 0, None, None
    worker._unfinished = worker._waits = worker._has_left = False
    worker._process = SimpleNamespace(pid=PID, returncode=None)  # type: ignore[assignment]
    for record in records:
        worker.heard(json.dumps({"pid": PID} | record).encode())
    return worker


LOOP = {"kind": "loop", "unfinished": True}
WAITS = LOOP | {"waits": True}
LEFT = LOOP | {"left": True}


def view(generation: int) -> dict[str, Any]:
    return {"kind": "view", "job": "digits", "rank": 1, "world_size": 3, "generation": generation}


def later(generation: int, job: str = "digits", seconds: float = 1.0) -> list[ReportedView]:
    """Returns a view that other workers report so many seconds from now."""
    return [ReportedView(job, generation, time.monotonic() + seconds)]


def test_a_worker_that_others_have_left_in_an_old_generation_is_behind() -> None:
    assert not a_worker(view(2), LOOP).is_behind(later(2))
    assert a_worker(view(2), LOOP).is_behind(later(3))


def test_views_of_another_job_do_not_count() -> None:
    assert not a_worker(view(2), LOOP).is_behind(later(3, "other"))


def test_views_that_were_reported_before_do_not_count() -> None:
    """A coordinator that has lost its state counts from 1 again, and another worker may not know that yet."""
    assert not a_worker(view(1), LOOP).is_behind(later(5, seconds=-1.0))
    assert not a_worker(view(5), LOOP).is_behind(later(1))


def test_a_worker_that_waits_to_be_taken_in_again_is_not_behind() -> None:
    assert not a_worker(view(2), LOOP, WAITS).is_behind(later(3))


def test_a_worker_that_came_back_may_fall_behind_again() -> None:
    back = (view(2), LOOP, WAITS, view(4))
    assert not a_worker(*back).is_behind(later(4))
    assert a_worker(*back).is_behind(later(5))


def test_a_worker_that_has_left_the_loop_or_has_yet_to_join_is_not_behind() -> None:
    assert not a_worker(view(2), LOOP, {"kind": "loop", "unfinished": False}).is_behind(later(3))
    assert not a_worker(view(2), LOOP, LEFT).is_behind(later(3)), "by an error, for example"
    assert not a_worker(view(2), LOOP, LEFT, view(3)).is_behind(later(4))
    assert not a_worker(LOOP).is_behind(later(3))


def test_records_of_a_process_that_the_worker_forked_do_not_count() -> None:
    others = {"pid": PID + 1}
    assert a_worker(view(2), LOOP, view(3) | others).is_behind(later(3))
    assert a_worker(view(2), LOOP, WAITS | others).is_behind(later(3))


def test_it_is_said_once_and_later_the_worker_counts_as_hung() -> None:
    behind = LeftBehind()
    behind.see([1], 10.0)
    assert (behind.to_tell(10.0), behind.hung(10.0)) == ([], [])
    assert behind.deadline == 10.0 + TELL_S
    behind.see([1], 12.0)
    assert behind.to_tell(9.99 + TELL_S) == []
    assert behind.deadline == 10.0 + TELL_S, "also if it is asked a moment later"
    assert behind.to_tell(10.0 + TELL_S) == [1]
    assert behind.to_tell(10.0 + TELL_S) == []
    assert behind.deadline == 10.0 + HUNG_S
    assert behind.hung(10.0 + HUNG_S) == [1]
    assert behind.deadline is None
    assert behind.hung(20.0 + HUNG_S) == [1], "whether it is ended may depend on something else"
    behind.begin_anew()
    behind.see([1], 60.0)
    assert behind.deadline == 60.0 + TELL_S
    assert behind.hung(60.0) == []


def test_the_time_begins_anew_for_a_worker_that_came_back() -> None:
    behind = LeftBehind()
    behind.see([1, 2], 10.0)
    assert behind.to_tell(10.0 + TELL_S) == [1, 2]
    behind.see([2], 20.0)
    behind.see([1, 2], 30.0)
    assert behind.hung(10.0 + HUNG_S) == [2]
    assert behind.to_tell(30.0 + TELL_S) == [1]
    assert behind.hung(30.0 + HUNG_S) == [1, 2]
