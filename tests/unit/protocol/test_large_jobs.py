"""What events cost in a job of many workers: lines of Python are counted, so that no load can change it.

All events come 20 us after one another, as when a network has been cut.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline_protocol import Meet, Tag
from paceline_protocol.coordinator import Effect, Event, ExitReported, JobState, MetOthers, Ticked, restore
from paceline_server.observatory import Observatory
from support.coordinator import PureJob
from support.counted_lines import lines_of

FEW, MANY = 250, 1_000


class Crowd(PureJob):
    """A job of many workers, whose time passes with each event; what happens to it is also counted."""

    def __init__(self, pace: float = 20e-6, state: JobState | None = None) -> None:
        super().__init__(state, pace=pace)
        self.observatory = Observatory(0.0)
        self.observatory.begin(self.now, self.state)

    def do(self, event: Event) -> list[Effect]:
        self.now += 20e-6
        if self.membership.next_deadline() <= self.now and not isinstance(event, Ticked):
            self.do(Ticked())
        effects = super().do(event)
        self.observatory.saw(self.now, event, effects, self.state, self.reason)
        return effects

    def rest(self) -> list[Effect]:
        """A while passes without events."""
        until, effects = self.now + 1.3, []
        while (due := self.membership.next_deadline()) < until:
            self.now = max(self.now, due)
            effects += self.do(Ticked())
        self.now = until
        return effects

    def meet(self, member_id: str, generation: int) -> list[Effect]:
        """The member, or the candidate, says that it holds the state before the first step."""
        return self.do(MetOthers(member_id, Meet(generation, Tag(0, 0), True, manifest=b"m")))

    def cut_all(self) -> None:
        """All streams end."""
        for member_id in list(self.state.sessions):
            self.cut(member_id)
        self.rest()


def waiting(world: int, pace: float = 20e-6) -> Crowd:
    """Workers wait for more."""
    crowd = Crowd(pace)
    for _ in range(world):
        crowd.join(world + 100, world + 100, timeout=600.0)
    crowd.rest()
    return crowd


def training(world: int, pace: float = 20e-6) -> Crowd:
    """A line runs."""
    crowd = Crowd(pace)
    members = [crowd.join(world, world, timeout=600.0) for _ in range(world)]
    crowd.rest()
    for member in members:
        crowd.meet(member, 1)
    crowd.rest()
    assert crowd.state.live is not None
    assert crowd.state.live.base is not None
    return crowd


def meeting(world: int, pace: float = 20e-6) -> Crowd:
    """A line's generation is over, and one member has stopped."""
    crowd = training(world, pace)
    first = next(iter(crowd.state.sessions))
    crowd.do(MetOthers(first, Meet(2, Tag(2, 7), True, manifest=b"m")))
    crowd.rest()
    assert "to leave the step" in crowd.reason
    return crowd


JOBS = [waiting, training, meeting]


@pytest.mark.parametrize("job", JOBS)
def test_cost_of_ending_all_streams_grows_linearly(job: Callable[[int], Crowd]) -> None:
    few, many = (lines_of(job(world).cut_all) for world in (FEW, MANY))
    assert many < 4.4 * few


@pytest.mark.parametrize("job", JOBS)
def test_cost_of_resuming_all_members_grows_linearly(job: Callable[[int], Crowd]) -> None:
    def lines(world: int) -> int:
        crowd = job(world)
        crowd.cut_all()

        def resume() -> None:
            for member_id, session in list(crowd.state.sessions.items()):
                crowd.resume(member_id, session.generation, stream=10_000)
            crowd.rest()

        return lines_of(resume)

    assert lines(MANY) < 4.4 * lines(FEW)


@pytest.mark.parametrize("first", ["the first rank", "the last rank"])
def test_cost_of_resuming_all_members_after_a_restart_grows_linearly(first: str) -> None:
    def lines(world: int) -> int:
        before = training(world).state
        crowd = Crowd(state=restore(100.0, "job", generation=before.generation, view=before.view))
        ids = list(crowd.state.sessions)

        def resume() -> None:
            for member_id in ids if first == "the first rank" else reversed(ids):
                crowd.resume(member_id, before.generation)
            crowd.rest()
            assert not crowd.state.restored

        return lines_of(resume)

    assert lines(MANY) < 4.4 * lines(FEW)


@pytest.mark.parametrize("job", JOBS)
def test_cost_of_reporting_all_exits_grows_linearly(job: Callable[[int], Crowd]) -> None:
    def lines(world: int) -> int:
        crowd = job(world)
        processes = [session.process for session in crowd.state.sessions.values()]

        def end() -> None:
            for process in processes:
                crowd.do(ExitReported(process, -9))
            crowd.rest()
            assert not crowd.state.sessions

        return lines_of(end)

    assert lines(MANY) < 4.4 * lines(FEW)


@pytest.mark.parametrize("job", JOBS)
def test_paced_decisions_equal_decisions_at_each_event(job: Callable[..., Crowd]) -> None:
    seldom, always, reasons = job(FEW), job(FEW, pace=1e-9), list[str]()
    for crowd in (seldom, always):
        crowd.cut_all()
        reasons.append(crowd.reason)
        newcomers = [crowd.join(FEW, FEW, timeout=600.0) for _ in range(5)]
        crowd.now += FEW * 20e-6  # the pause
        crowd.do(Ticked())
        assert all(crowd.state.sessions[member_id].told for member_id in newcomers), "newcomers are told at once"
        crowd.meet(newcomers[0], 0)
        crowd.rest()
        assert all(crowd.state.sessions[member_id].told == crowd.reason for member_id in newcomers)
    assert reasons[0] == reasons[1]
    assert seldom.reason == always.reason
    assert [(s.member_id, s.standing, s.met) for s in seldom.state.sessions.values()] == [
        (s.member_id, s.standing, s.met) for s in always.state.sessions.values()
    ]


@pytest.mark.parametrize("world", [FEW, MANY])
def test_a_single_event_is_decided_at_once(world: int) -> None:
    crowd = waiting(world)
    crowd.join(world + 100, world + 100, timeout=600.0)
    assert f"({world + 1} of at least" in crowd.reason


def test_cost_of_a_meet_does_not_grow_with_the_number_of_workers() -> None:
    def lines(world: int) -> int:
        crowd = waiting(world)
        members = list(crowd.state.sessions)
        crowd.meet(members[0], 0)  # this one is decided at once
        return lines_of(lambda: [crowd.meet(member, 0) for member in members[1:50]])

    assert lines(MANY) < 1.05 * lines(FEW)


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"])
def test_cost_of_a_registration_does_not_grow_with_the_number_of_workers(address: str | None) -> None:
    def lines(world: int) -> int:
        crowd = Crowd()

        def join(count: int) -> None:
            for _ in range(count):
                crowd.join(world + 100, world + 100, host="box" if address else None, address=address, timeout=600.0)

        join(world)
        crowd.rest()
        join(1)  # this one is decided at once
        return lines_of(lambda: join(50))

    assert lines(MANY) < 1.05 * lines(FEW)
