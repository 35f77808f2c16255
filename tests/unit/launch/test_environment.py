"""What a worker finds in its environment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch._environment import Place, WorkerSettings, worker_bounds, worker_environment

SETTINGS = WorkerSettings("host:7400", "digits", 2, 4)

PLACE = Place(
    workers=2,
    world_size=5,
    first_rank=3,
    node=1,
    nodes=2,
    master_addr="node1",
    master_port=29500,
    run_id="digits",
    restart=1,
    max_restarts=3,
)


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
def test_bounds(asked: tuple[int, int | None, int | None], bounds: tuple[int, int]) -> None:
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
def test_bounds_that_cannot_be(asked: tuple[int, int | None, int | None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        worker_bounds(*asked)


def test_the_job_and_the_pipe_are_there() -> None:
    environment = worker_environment({"HOME": "/h", "PACELINE_JOB": "other"}, SETTINGS, 7)
    assert environment["HOME"] == "/h"
    assert environment["PACELINE_COORDINATOR"] == "host:7400"
    assert environment["PACELINE_JOB"] == "digits"
    assert environment["PACELINE_MIN_WORKERS"] == "2"
    assert environment["PACELINE_MAX_WORKERS"] == "4"
    assert environment["PACELINE_LAUNCHER_FD"] == "7"


def test_one_thread_a_worker_unless_the_user_says_otherwise() -> None:
    environment = worker_environment({"OMP_NUM_THREADS": "3"}, SETTINGS, 7)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["OPENBLAS_NUM_THREADS"] == "1"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert environment["PYTHONFAULTHANDLER"] == "1"


def test_an_explicit_rank_does_not_go_to_all_workers() -> None:
    environment = worker_environment({"PACELINE_RANK": "1", "PACELINE_WORLD_SIZE": "4"}, SETTINGS, 7)
    assert "PACELINE_RANK" not in environment
    assert "PACELINE_WORLD_SIZE" not in environment


def test_workers_start_with_what_the_library_of_their_engine_reads() -> None:
    own = {"PACELINE_ENGINE": "nccl", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "7"}
    environment = worker_environment(own, SETTINGS, 7)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environment["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7"
    assert not [name for name in worker_environment({}, SETTINGS, 7) if name.startswith("TORCH_")]


def test_each_process_compiles_into_its_own_folder_unless_the_user_names_one() -> None:
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")

    def folders(**own: str) -> list[str | None]:
        environment = worker_environment(own, SETTINGS, 7, compiled=Path("/c/3"))
        return [environment.get(name) for name in names]

    assert folders() == ["/c/3/inductor", "/c/3/triton"]
    assert folders(TORCHINDUCTOR_CACHE_DIR="/mine") == ["/mine", None]  # torch has Triton's inside of it
    assert folders(TRITON_CACHE_DIR="/mine") == ["/c/3/inductor", "/mine"]
    assert not set(names) & worker_environment({}, SETTINGS, 7).keys()


def test_where_others_reach_the_workers() -> None:
    assert "PACELINE_ADVERTISE" not in worker_environment({}, SETTINGS, 7)
    assert worker_environment({}, replace(SETTINGS, advertise="h"), 7)["PACELINE_ADVERTISE"] == "h"


def test_torchrun_s_variables() -> None:
    environment = worker_environment({"RANK": "9", "TORCHELASTIC_USE_AGENT_STORE": "True"}, at_place(PLACE), 7, 1)
    expected = {
        "RANK": "4",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "4",
        "ROLE_WORLD_SIZE": "5",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "digits",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # of a launcher further out
    }
    assert expected.items() <= environment.items()


def test_the_rank_in_paceline_s_groups_is_torch_s() -> None:
    base = {"PACELINE_RANK": "9", "PACELINE_WORLD_SIZE": "10", "PACELINE_MIN_WORKERS": "2", "PACELINE_MAX_WORKERS": "3"}
    environment = worker_environment(base, at_place(PLACE), 7, 0)
    assert environment["PACELINE_RANK"] == environment["RANK"] == "3"
    assert environment["PACELINE_WORLD_SIZE"] == environment["WORLD_SIZE"] == "5"
    assert "PACELINE_MIN_WORKERS" not in environment  # explicit ranks fix the world: `join` takes no bounds beside them
    assert "PACELINE_MAX_WORKERS" not in environment


def test_a_worker_alone_on_its_node_has_all_cores() -> None:
    assert worker_environment({}, at_place(PLACE), 7)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in worker_environment({}, at_place(replace(PLACE, workers=1)), 7)
    assert worker_environment({"OMP_NUM_THREADS": "3"}, at_place(PLACE), 7)["OMP_NUM_THREADS"] == "3"


def test_without_torchrun_s_flags_nothing_of_torch_s_is_set() -> None:
    environment = worker_environment({}, SETTINGS, 7)
    assert "RANK" not in environment
    assert "LOCAL_RANK" not in environment, "libraries of torch would wait for a world of torchrun"


def test_each_worker_knows_its_number_on_the_host() -> None:
    base = {"PACELINE_LOCAL_RANK": "9"}  # of a launcher further out
    assert worker_environment(base, SETTINGS, 7, 3)["PACELINE_LOCAL_RANK"] == "3"
    assert worker_environment(base, at_place(PLACE), 7, 1)["PACELINE_LOCAL_RANK"] == "1"


def at_place(place: Place) -> WorkerSettings:
    return replace(SETTINGS, place=place)


def test_a_scheduler_without_a_pipe_hands_none_on() -> None:
    """Not even one of its own, as the worker of a launcher that it may be."""
    environment = worker_environment({"PACELINE_LAUNCHER_FD": "9"}, SETTINGS, index=2)
    assert "PACELINE_LAUNCHER_FD" not in environment
    assert environment["PACELINE_LOCAL_RANK"] == "2"
