"""Contenders take turns, and what is timed is the collective that the row names, by the schedule that it names."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedRWPair
from typing import BinaryIO, cast

import pytest

from conductor import ContenderFailed, Ensemble, Turn, measure
from contenders import Call, Lacking, PacelineRanks, RankSide, forced, make_call, serve, time_calls
from jobs import COLLECTIVES, MEMORIES, PLACES, Job, check_result, given, result_parts
from paceline._collectives.choose import choose
from paceline._group import Group
from paceline.testing import run_ranks

WORLD = 3
SUM, ONE_BY_ONE = [6.0] * 6, [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]

RESULTS: dict[str, list[list[float] | None]] = {
    "all_reduce": [SUM, SUM, SUM],
    "reduce": [SUM, None, None],
    "reduce_scatter": [SUM[:2], SUM[:2], SUM[:2]],
    "broadcast": [[1.0] * 6] * 3,
    "scatter": [[1.0] * 2] * 3,
    "all_gather": [ONE_BY_ONE] * 3,
    "gather": [ONE_BY_ONE, None, None],
    "all_to_all": [ONE_BY_ONE] * 3,
    "send_recv": [[3.0] * 6, [1.0] * 6, [2.0] * 6],
    "barrier": [None] * 3,
}

NAMES = [name.replace("-", "_") for name in COLLECTIVES]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(
    ("collective", "place"), [*((name, "usual") for name in NAMES), *(("all_reduce", place) for place in PLACES[1:])]
)
def test_a_call_runs_its_collective_and_can_be_repeated(collective: str, memory: str, place: str) -> None:
    def rank(group: Group) -> list[float] | None:
        call = make_call(group, collective, 0 if collective == "barrier" else 6 * 4, memory, place)
        call.run()
        check_result(call.result, result_parts(collective, group.rank, WORLD, in_place=call.in_place))
        call.run()
        return None if call.result is None else call.result.tolist()

    in_place = collective == "all_reduce" and place != "out"
    assert run_ranks(WORLD, rank) == ([[0.0] * 6] * 3 if in_place else RESULTS[collective])


@pytest.mark.parametrize("collective", NAMES)
def test_result_parts_match_the_result_of_each_rank(collective: str) -> None:
    for rank, result in enumerate(RESULTS[collective]):
        parts = result_parts(collective, rank, WORLD, in_place=False)
        assert [part for part in parts for _ in range(len(result or []) // len(parts))] == (result or [])


def test_inputs_of_in_place_sums_add_up_to_zero() -> None:
    for world in (2, 3, 4, 7):
        values = [given(rank, world, in_place=True) for rank in range(world)]
        assert sum(values) == 0
        assert any(values)


class Fake:
    """A contender whose calls take a fixed time; notes what it is told."""

    def __init__(
        self, log: list[str], impl: str, seconds: float, *, schedules: bool = False, lacks: str | None = None
    ) -> None:
        self.impl, self.link, self.schedules = impl, "tcp", schedules
        self._log, self._seconds, self._lacks = log, seconds, lacks

    def prepare(self, job: Job) -> str | None:
        return self._lacks

    def run(self, calls: int, schedule: str | None) -> Turn:
        self._log.append(f"{self.impl} {schedule or '-'} {calls}")
        return Turn([self._seconds] * calls, self._seconds * calls, schedule, ("tcp",))


def test_contenders_and_schedules_take_turns() -> None:
    log: list[str] = []
    contenders = [Fake(log, "a", 0.01, schedules=True), Fake(log, "b", 0.001)]
    results = measure(Job("all_reduce", 4, ("ring", "star")), contenders, budget_s=0.5)
    lanes = ["a ring", "a star", "b -"]
    to_warm_up = [f"{lane} {calls}" for lane in lanes for calls in (1, 5, 3)]
    assert log == to_warm_up + ["a ring 5", "a star 5", "b - 50"] * 10
    assert [(result.contender.impl, result.asked, len(result.seconds)) for result in results] == [
        ("a", "ring", 50),
        ("a", "star", 50),
        ("b", None, 500),
    ]


@pytest.mark.parametrize(
    ("seconds", "calls"), [(10.0, ["a - 1", "a - 10"]), (1e-6, ["a - 1", "a - 5", "a - 3", "a - 2000"])]
)
def test_a_lone_contender_has_one_turn_with_a_bounded_number_of_calls(seconds: float, calls: list[str]) -> None:
    log: list[str] = []
    measure(Job("barrier", 0), [Fake(log, "a", seconds)])
    assert log == calls


def test_a_contender_that_lacks_a_collective_has_no_turns() -> None:
    log: list[str] = []
    job = Job("gather", 4, ("direct", "star"))
    unable, able = measure(job, [Fake(log, "a", 1, schedules=True, lacks="no"), Fake(log, "b", 1)], 1)
    assert (unable.lacks, unable.turns, able.lacks) == ("no", [], None)
    assert not [line for line in log if line.startswith("a")]


class Alone(RankSide):
    """A rank that does with nobody what it is told to."""

    def __init__(self, rank: int, call: Callable[[], object] = lambda: None) -> None:
        self.rank, self.world, self._call = rank, 2, call

    def make_call(self, collective: str, size: int, place: str = "usual") -> Call:
        if collective == "gather":
            raise Lacking("there is no gather")
        return Call(self._call, None)

    def barrier(self) -> None:
        """Nobody to wait for."""

    def links(self, collective: str) -> Sequence[str]:
        return ["shm", "grpc"][: self.rank + 1]

    def lacks(self, error: RuntimeError) -> bool:
        return "not supported" in str(error)


@contextmanager
def conducted(path: str, ranks: Sequence[RankSide]) -> Iterator[Ensemble]:
    """Ranks in threads that serve an ensemble over sockets, as processes do."""
    ensemble = Ensemble("them", "gloo", "tcp", schedules=False)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        threads = [threading.Thread(target=serve, args=(path, "them", rank)) for rank in ranks]
        for thread in threads:
            thread.start()
            connection, _ = listener.accept()
            with connection:
                stream: BufferedRWPair = connection.makefile("rwb")
            hello = json.loads(stream.readline())
            assert hello["name"] == "them"
            ensemble.lines[hello["rank"]] = cast(BinaryIO, stream)
    try:
        yield ensemble
    finally:
        ensemble.stop()
        for thread in threads:
            thread.join()


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("s") / "s")  # a socket's path has 108 bytes at most


def test_the_conductor_collects_times_and_links_of_all_ranks(path: str) -> None:
    with conducted(path, [Alone(0), Alone(1)]) as ensemble:
        assert ensemble.prepare(Job("barrier", 0)) is None
        turn = ensemble.run(7, None)
        assert len(turn.seconds) == 7
        assert turn.took_s >= sum(turn.seconds) / 2 > 0
        assert turn.links == ("grpc", "shm")
        assert ensemble.prepare(Job("gather", 8)) == "there is no gather"
        assert ensemble.prepare(Job("barrier", 0)) is None
        ensemble.end()


def test_a_call_takes_as_long_as_its_slowest_rank(path: str) -> None:
    class Told(Ensemble):
        def _ask(self, order: dict[str, object]) -> list[dict[str, object]]:
            return [
                {"ns": [1000, 5000], "took_ns": 7000, "schedule": "ring", "links": ["grpc"]},
                {"ns": [3000, 2000], "took_ns": 8000, "schedule": "ring", "links": ["grpc"]},
            ]

    assert Told("x", "x", "x", schedules=False).run(2, None) == Turn([3e-6, 5e-6], 8e-6, "ring", ("grpc",))


def test_an_unsupported_collective_is_reported_and_not_an_error(path: str) -> None:
    def refuse() -> None:
        raise RuntimeError("reduce_scatter is not supported\nby this backend")

    with conducted(path, [Alone(0, refuse)]) as ensemble:
        assert ensemble.prepare(Job("reduce_scatter", 8)) == "reduce_scatter is not supported"


def test_a_rank_that_is_gone_raises_contender_failed(path: str) -> None:
    with conducted(path, [Alone(0), Alone(1)]) as ensemble:
        for line in ensemble.lines.values():
            line.write(b'{"do": "end"}\n')
            line.flush()
        with pytest.raises(ContenderFailed, match=r"them: rank [01] is gone"):
            ensemble.run(1, None)


def test_a_wrong_result_raises_arithmetic_error() -> None:
    def rank(group: Group) -> None:
        call = make_call(group, "all_reduce", 8)
        call.run()
        assert call.result is not None
        call.result[1] += group.rank
        check_result(call.result, result_parts("all_reduce", group.rank, 2, in_place=True))

    with pytest.raises(ArithmeticError, match=r"between 0.0 and 1.0, but should be 0.0"):
        run_ranks(2, rank)


def test_separate_calls_have_a_barrier_each() -> None:
    def log(separate: bool) -> str:
        said: list[str] = []
        times = time_calls(lambda: said.append("|"), lambda: said.append("x"), 3, separate=separate)
        assert len(times) == 3
        assert min(times) >= 0
        return "".join(said)

    assert (log(separate=False), log(separate=True)) == ("|xxx", "||x|x|x")


def test_paceline_ranks_report_their_schedule_and_links() -> None:
    def rank(group: Group) -> tuple[str | None, str | None, str | None, list[str]]:
        assert list(PacelineRanks(group).links("send_recv")) == []  # nobody has sent anything
        ranks = PacelineRanks(group)
        ranks.make_call("all_gather", 24).run()
        with ranks.scheduled("all_gather", "ring"):
            forced = ranks.chosen("all_gather", 24)
        return (
            ranks.chosen("all_gather", 24),
            forced,
            ranks.chosen("send_recv", 4),
            sorted(set(ranks.links("all_gather"))),
        )

    assert run_ranks(2, rank) == [(choose("all_gather", 24, 2).schedule, "ring", None, ["local"])] * 2


def test_a_forced_schedule_applies_only_within_its_block() -> None:
    def rank(group: Group) -> tuple[str, str, str, str]:
        with forced(group, "all_reduce", "ring"):
            inside = group._core.choose("all_reduce", 4, 2).schedule
            other = group._core.choose("barrier", 0, 2).schedule
            with forced(group, "barrier", None):
                still = group._core.choose("all_reduce", 4, 2).schedule
        return inside, other, still, group._core.choose("all_reduce", 4, 2).schedule

    assert run_ranks(1, rank) == [
        ("ring", choose("barrier", 0, 2).schedule, "ring", choose("all_reduce", 4, 2).schedule)
    ]
