"""What `paceline_ray` decides without Ray."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable

import pytest

import paceline_ray
from paceline import Config
from paceline.launch import Exit, ReplicaSupervision, Supervision, Terms
from paceline_ray._controller import _Controller, _Hosted, actor_options, is_over, results_of
from paceline_ray._hosted_worker import Finished, JoinTerms, WorkerPlace


def test_resources_become_options_of_actors() -> None:
    assert actor_options({"CPU": 4, "GPU": 0.5, "memory": 1e9, "rack-a": 1}) == {
        "num_cpus": 4,
        "num_gpus": 0.5,
        "memory": 1e9,
        "resources": {"rack-a": 1},
    }
    assert actor_options({"GPU": 1})["num_cpus"] == 0, "only what was asked for"
    with pytest.raises(ValueError, match=r"resources\['CPU'\] must be 0 or more, not -1"):
        actor_options({"CPU": -1})
    with pytest.raises(ValueError, match="not nan"):
        actor_options({"CPU": float("nan")})


def test_results_are_those_of_the_last_generation_by_rank() -> None:
    finished = [
        Finished(1, 7, "one"),
        Finished(0, 5, "left earlier"),
        Finished(-1, 0, dismissed=True),
        Finished(0, 7, "zero"),
    ]
    assert list(results_of(finished).items()) == [(0, "zero"), (1, "one")]
    assert results_of([Finished(-1, 0, dismissed=True)]) == {}


DRAINED, DONE = Finished(-1, 0, dismissed=True), Finished(0, 7, "value")


@pytest.mark.parametrize(
    ("finished", "has_failed", "over"),
    [
        ([], False, False),  # nobody has begun: Ray may still find room
        ([], True, False),
        ([DONE], False, True),
        ([DONE], True, True),  # its last step was the job's last, whoever died there
        ([DRAINED], False, True),  # all were drained
        ([DRAINED], True, False),  # rank 1 was drained, then rank 0 died: its replacement trains on
        ([DRAINED, DONE], True, True),
    ],
)
def test_the_end_of_a_run_depends_on_finished_and_failed_workers(
    finished: list[Finished], has_failed: bool, over: bool
) -> None:
    assert is_over(finished, has_failed=has_failed) is over


class FakeRay:
    """Makes actors that Ray never places, as in a cluster without room."""

    def put(self, value: object) -> object:
        return value

    def remote(self, kind: type) -> FakeRay:
        return self

    def kill(self, actor: object) -> None:
        """Kills nobody: there are no actors."""

    def options(self, **options: object) -> Callable[[], object]:
        return lambda: None


def test_the_replacement_of_a_dead_worker_is_awaited_after_a_drain() -> None:
    supervision = Supervision(8.0, Terms(workers=2, minimum=1, elastic=True, restarts=1))
    terms = JoinTerms("10.0.0.7:7400", "default", 1, 2, Config())
    controller = _Controller(FakeRay(), (print, ()), terms, {}, supervision, None)  # type: ignore[arg-type]
    supervision.began(0, 0.0)
    supervision.began(1, 0.0)
    controller._finished[1] = DRAINED
    supervision.ended(Exit("rank 1", 2, 0, slot=1), 9.0)
    controller._hosted[0] = _Hosted(0, actor=None, waited_for=None)  # one that replaces nobody
    assert not controller._unfinished(), "all that trained were drained"
    controller._errors[0] = RuntimeError("died")
    supervision.ended(Exit("rank 0", 1, 1, slot=0, joined=True, words="died"), 10.0)
    assert supervision.restarts_due(99.0) == [0]
    assert controller._unfinished(), "its replacement has no room yet"


def test_a_replica_whose_rank_cannot_be_placed_ends_with_the_rank_that_waits_for_it() -> None:
    terms = Terms(workers=1, minimum=1, elastic=True, restarts=1)
    supervision = ReplicaSupervision(8.0, terms, 2)
    join = JoinTerms("10.0.0.7:7400", "default", 1, 1, Config())
    controller = _Controller(FakeRay(), (print, ()), join, {}, supervision, None, 2)  # type: ignore[arg-type]
    controller._next_look = math.inf
    place = WorkerPlace("host", 7, "10.0.0.7")
    controller._hosted[1] = waits = _Hosted(1, actor=None, waited_for=None, place=place, replica_size=2)
    failed = _Hosted(0, actor=None, waited_for=None, replica_size=2)
    assert supervision.ended(failed.end(1, "raised ModuleNotFoundError: torch"), time.monotonic() - 1.0) == ""
    controller._turn()
    assert waits not in controller._hosted.values()
    assert supervision.restarts_due(time.monotonic() + 1.0) == [0, 1]


def test_the_end_of_an_actor_is_reported_in_words() -> None:
    supervision = Supervision(8.0, Terms(workers=2, minimum=1, elastic=True, restarts=1))
    supervision.began(1, 0.0)
    end = Exit("rank 1 on 10.0.0.7", 4016, 1, slot=1, joined=True, words="died")
    assert supervision.ended(end, 9.0) == (
        "restarting rank 1 on 10.0.0.7 (pid 4016 died) as a new worker in 0.1 s (its only restart)"
    )
    assert supervision.ended(end, 19.0) == (
        "rank 1 on 10.0.0.7 (pid 4016) died; its only restart is used up; 1 of 2 workers is left"
    )
    assert str(supervision.failure) == "rank 1 on 10.0.0.7 (pid 4016) died"


def test_the_token_is_in_no_repr() -> None:
    terms = JoinTerms("10.0.0.7:7400", "default", 1, 2, Config(), "a-secret")
    assert "a-secret" not in repr(terms)


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r'paceline_ray needs Ray: pip install "ray>=2'):
        paceline_ray.run(print, min_workers=1)
