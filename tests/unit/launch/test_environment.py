"""What a worker finds in its environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from paceline._base.launcher_variables import LAUNCH
from paceline._session.identity import launch_of
from paceline.launch._environment import (
    WorkerSettings,
    torch_world,
    without_torchruns,
    worker_bounds,
    worker_environment,
)
from pacelinepb.v1 import session_pb2 as pb

SETTINGS = WorkerSettings("host:7400", "digits", 2, 4)


@pytest.mark.parametrize(
    ("asked", "bounds"),
    [
        ((4, None, None), (4, 4)),  # the job is what this launcher starts
        ((2, 4, None), (4, 4)),  # other launchers bring the rest
        ((4, 2, None), (2, 4)),
        ((2, 2, 8), (2, 8)),
        ((1, None, None), (1, 1)),
    ],
)
def test_worker_bounds_follow_from_n_min_and_max(
    asked: tuple[int, int | None, int | None], bounds: tuple[int, int]
) -> None:
    assert worker_bounds(*asked) == bounds


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((0, None, None), "-n must be 1 or more, not 0"),
        ((2, 0, None), "--min must be 1 or more, not 0"),
        ((2, 4, 3), "--max 3 is below the minimum of 4 workers"),
        ((4, 1, 2), "-n 4 workers do not fit into a job of at most 2"),
    ],
)
def test_impossible_worker_bounds_are_refused(asked: tuple[int, int | None, int | None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        worker_bounds(*asked)


@pytest.mark.parametrize(
    ("asked", "bounds"),
    [
        ((8, None, None, 4), (2, 2)),
        ((8, 1, None, 4), (1, 2)),
        ((8, 3, None, 4), (3, 3)),  # other launchers bring the third
        ((8, 1, 5, 4), (1, 5)),
        ((3, None, None, 1), (3, 3)),
    ],
)
def test_bounds_count_replicas_if_workers_are_their_ranks(
    asked: tuple[int, int | None, int | None, int], bounds: tuple[int, int]
) -> None:
    assert worker_bounds(*asked) == bounds


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((8, None, None, 0), "--replica-size must be 1 or more, not 0"),
        ((6, None, None, 4), "-n 6 is no multiple of --replica-size 4: -n counts processes"),
        ((2, None, None, 4), "-n 2 is no multiple of --replica-size 4"),
        ((8, 4, 3, 4), "--max 3 is below the minimum of 4 replicas"),
        ((8, 1, 1, 4), r"-n 8: 2 replicas do not fit into a job of at most 1 \(--max\)"),
    ],
)
def test_impossible_replicas_are_refused(asked: tuple[int, int | None, int | None, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        worker_bounds(*asked)


def test_worker_environment_has_job_bounds_and_launcher_pipe() -> None:
    environment = worker_environment({"HOME": "/h", "PACELINE_JOB": "other"}, SETTINGS, 7)
    assert environment["HOME"] == "/h"
    assert environment["PACELINE_COORDINATOR"] == "host:7400"
    assert environment["PACELINE_JOB"] == "digits"
    assert environment["PACELINE_MIN_WORKERS"] == "2"
    assert environment["PACELINE_MAX_WORKERS"] == "4"
    assert environment["PACELINE_LAUNCHER_FD"] == "7"


def test_workers_get_one_thread_unless_the_user_sets_the_number() -> None:
    environment = worker_environment({"OMP_NUM_THREADS": "3"}, SETTINGS, 7)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OPENBLAS_NUM_THREADS"] == "1"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["PYTHONFAULTHANDLER"] == "1"


def test_an_explicit_rank_is_not_passed_to_workers() -> None:
    environment = worker_environment({"PACELINE_RANK": "1", "PACELINE_WORLD_SIZE": "4"}, SETTINGS, 7)
    assert "PACELINE_RANK" not in environment
    assert "PACELINE_WORLD_SIZE" not in environment


def test_workers_start_with_the_variables_of_their_engine() -> None:
    own = {"PACELINE_ENGINE": "nccl", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "7"}
    environment = worker_environment(own, SETTINGS, 7)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7"
    assert not [name for name in worker_environment({}, SETTINGS, 7) if name.startswith("TORCH_")]


def test_workers_have_compile_caches_of_their_own_unless_the_user_sets_one() -> None:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

    def folders(**own: str) -> list[str | None]:
        environment = worker_environment(own, SETTINGS, 7, compiled=Path("/c/3"))
        return [environment.get(name) for name in names]

    assert folders() == ["/c/3/inductor", "/c/3/triton"]
    assert folders(TORCHINDUCTOR_CACHE_DIR="/mine") == ["/mine", None]  # torch has Triton's inside of it
    assert folders(TRITON_CACHE_DIR="/mine") == ["/c/3/inductor", "/mine"]
    assert not set(names) & worker_environment({}, SETTINGS, 7).keys()


def test_the_advertised_address_is_passed_only_if_set() -> None:
    assert "PACELINE_ADVERTISE" not in worker_environment({}, SETTINGS, 7)
    assert worker_environment({}, replace(SETTINGS, advertise="h"), 7)["PACELINE_ADVERTISE"] == "h"


def test_variables_of_torchrun_are_not_set() -> None:
    environment = worker_environment({}, SETTINGS, 7)
    assert "RANK" not in environment
    assert "LOCAL_RANK" not in environment, "libraries of torch would wait for a world of torchrun"


def test_workers_know_their_launch_and_how_many_were_started_with_them() -> None:
    told = worker_environment({LAUNCH: "outer:3"}, replace(SETTINGS, at_once=2, launch_id="inner"), 7)
    assert told[LAUNCH] == "inner:2"
    assert launch_of(told, 60.0) == pb.Launch(id="inner", workers=2, patience=Duration(seconds=45))
    alone = worker_environment({LAUNCH: "outer:3"}, SETTINGS, 7)
    assert launch_of(alone, 60.0) is None, "the launcher around this one has not started this worker"


@pytest.mark.parametrize("text", ["abc", "abc:", ":4", "a b:4", "abc:-1", "abc:999999"])
def test_a_launch_that_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="PACELINE_LAUNCH must be ID:WORKERS"):
        launch_of({LAUNCH: text}, 60.0)


def test_the_world_of_an_outer_launcher_is_not_passed_on() -> None:
    outer = torch_world(1, 2, 29_500) | {"PACELINE_TORCH_WORLD": "1", "MINE": "x"}
    assert not {*torch_world(1, 2, 29_500), "PACELINE_TORCH_WORLD"} & worker_environment(outer, SETTINGS, 7).keys()
    del outer["PACELINE_TORCH_WORLD"]
    assert worker_environment(outer, SETTINGS, 7)["RANK"] == "1", "it is the user's"


def test_the_ranks_of_a_replica_find_its_world_and_a_device_each() -> None:
    worlds = [torch_world(index, 2, 29_500) for index in range(4)]
    assert [world["RANK"] for world in worlds] == ["0", "1", "0", "1"]
    assert [world["LOCAL_RANK"] for world in worlds] == ["0", "1", "2", "3"], "torch chooses the GPU by it"
    (rest,) = {(world["WORLD_SIZE"], world["LOCAL_WORLD_SIZE"], world["MASTER_PORT"]) for world in worlds}
    assert rest == ("2", "2", "29500")


def test_what_torchrun_says_of_its_agent_is_not_passed_on() -> None:
    """Rank 0 of a replica would look for torchrun's store, and not start its own."""
    base = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "a", "TORCH_LOGS": "+dynamo"}
    assert without_torchruns(base) == {"TORCH_LOGS": "+dynamo"}


def test_each_worker_gets_its_local_rank() -> None:
    base = {"PACELINE_LOCAL_RANK": "9"}  # of a launcher further out
    assert worker_environment(base, SETTINGS, 7, 3)["PACELINE_LOCAL_RANK"] == "3"


def test_an_inherited_pipe_is_removed_if_the_launcher_has_none() -> None:
    """Not even one of its own, as the worker of a launcher that it may be."""
    environment = worker_environment({"PACELINE_LAUNCHER_FD": "9"}, SETTINGS, index=2)
    assert "PACELINE_LAUNCHER_FD" not in environment
    assert environment["PACELINE_LOCAL_RANK"] == "2"
