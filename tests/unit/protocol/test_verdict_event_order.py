"""Whatever the order in which news of deaths comes: a verdict names the dead, and no member that is well is evicted."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest
from unit.protocol.test_meeting import elastic

from paceline.config import Config
from paceline_protocol import Meet, Report, Tag
from paceline_protocol.coordinator import (
    AddressRefused,
    Effect,
    EndSession,
    ExitReported,
    Heard,
    MetOthers,
    Reported,
    Ticked,
)
from paceline_protocol.messages import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.coordinator import PureJob, sent

LOST = ErrorReason.ERROR_REASON_PEER_LOST


class Timeline:
    """Events of one job in the order of their times; time alone is handled when the job wants it."""

    def __init__(self, job: PureJob) -> None:
        self.job = job
        self.start = job.now
        self.effects: list[Effect] = []
        self._queue: list[tuple[float, int, Callable[[], list[Effect]]]] = []
        self._order = itertools.count()

    def at(self, seconds: float, do: Callable[[], list[Effect]]) -> None:
        """Plans something, so many seconds after the beginning."""
        heapq.heappush(self._queue, (self.start + seconds, next(self._order), do))

    def run(self, until: Callable[[], bool], seconds: float = 10.0) -> float:
        """Runs until something is true; returns the seconds since the beginning."""
        while not until():
            due = self.job.membership.next_deadline()
            if self._queue and self._queue[0][0] <= due:
                self.job.now, _, do = heapq.heappop(self._queue)
                self.effects += do()
            else:
                self.job.now = max(self.job.now, due)
                self.effects += self.job.do(Ticked())
            assert self.job.now - self.start < seconds, self.job.reason
        return self.job.now - self.start


def ended(effects: list[Effect]) -> set[str]:
    return {effect.member_id for effect in effects if isinstance(effect, EndSession)}


def kill_some(job: PureJob, members: list[str], dead: list[str], chance: random.Random) -> tuple[Timeline, float]:
    """Some die at once. News of it comes in any order, within 0.1 s, and the others stop; returns how long that took.

    Everybody has links to its neighbours in the ring and to some others. Half of those that lose a link hear of the
    failure from a peer, and report nothing.
    """
    job.pass_time(1.0, members)
    line, world = Timeline(job), len(members)
    generation = job.state.generation
    alive = [member for member in members if member not in dead]
    for member in alive:
        rank = members.index(member)
        linked = {(rank + 1) % world, (rank - 1) % world, *chance.sample(range(world), min(world, 4))} - {rank}
        lost = [other for other in linked if members[other] in dead]
        if lost and chance.random() < 0.5:
            report = Report(-1, LOST, chance.choice(lost), 7, "the link ended")
            line.at(chance.uniform(0.0, 0.02), lambda m=member, r=report: job.do(Reported(m, generation, r)))
        for beat in range(20):
            line.at(
                chance.uniform(0.0, 0.5) + beat / 2,
                lambda m=member: job.do(Heard(m, job.state.sessions[m].progress)),
            )
    for member in dead:
        session = job.state.sessions[member]
        gone = chance.uniform(0.0, 0.1)
        line.at(gone, lambda m=member: job.cut(m) if m in job.state.sessions else [])
        if chance.random() < 0.5:
            line.at(gone + chance.uniform(0.0, 0.5), lambda m=member: job.do(AddressRefused(m)))
        else:
            line.at(chance.uniform(0.0, 0.5), lambda s=session: job.do(ExitReported(s.process, -9)))
    stopped: set[str] = set()

    def stop(member: str) -> list[Effect]:
        if job.state.verdict is None:  # nobody tells it to, yet
            line.at(job.now - line.start + 0.01, lambda: stop(member))
            return []
        stopped.add(member)
        return job.do(MetOthers(member, Meet(generation, Tag(2, 3), True)))

    for member in alive:
        line.at(chance.uniform(0.0, 0.3), lambda m=member: stop(m))
    return line, line.run(lambda: job.state.live is not None and job.state.generation > generation)


@pytest.mark.parametrize(("world", "deaths", "seeds"), [(4, 1, 50), (4, 2, 100), (8, 4, 100), (60, 20, 20)])
def test_a_verdict_names_the_dead_and_no_survivor_is_evicted(world: int, deaths: int, seeds: int) -> None:
    for seed in range(seeds):
        chance = random.Random(seed)
        job, members = elastic(world, most=100)
        dead = chance.sample(members, deaths)
        line, seconds = kill_some(job, members, dead, chance)
        verdicts = [verdict for _, verdict in sent(line.effects, Verdict)]
        assert verdicts, seed
        assert {members[rank] for rank in verdicts[0].culprits} <= set(dead), (seed, verdicts[0].text)
        assert ended(line.effects) <= set(dead), seed
        assert job.state.live is not None
        assert len(job.state.live.seats) == world - deaths, seed
        assert seconds < 1.0, seed


@pytest.mark.parametrize("dead_first", [True, False])
def test_stream_end_after_a_verdict_evicts_only_an_end_of_a_broken_link(dead_first: bool) -> None:
    """Rank 1 has lost rank 0; both look well when rank 2 is known to be dead. The one whose stream ends has died."""
    job, (first, second, third, fourth) = elastic(4)
    job.report(second, LOST, 0)
    job.do(ExitReported(job.state.sessions[third].process, -9))
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (2,)
    assert {first, second, fourth} <= job.state.sessions.keys()
    gone = first if dead_first else second
    assert ended(job.cut(fourth)) == set(), "no link of it has ended"
    assert ended(job.cut(gone)) == {gone}


def test_a_late_tick_gives_no_verdict_before_pending_events_are_read() -> None:
    """Time is up before it reads that the stream of rank 0 has ended."""
    job, (first, second, third) = elastic(3)
    job.report(second, LOST, 0)
    job.now += 0.15
    job.do(Ticked())
    assert job.state.verdict is None
    job.cut(first)
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (0,)
    assert {second, third} <= job.state.sessions.keys()


def test_time_the_coordinator_slept_does_not_count_toward_a_verdict() -> None:
    job, (first, second, _) = elastic(3)
    job.report(second, LOST, 0)
    job.pass_time(1.0, slept=1.0)
    assert job.state.verdict is None
    assert job.membership.next_deadline() == pytest.approx(job.now + 0.08)
    job.cut(first)
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (0,)


@pytest.mark.parametrize("speaks", [False, True])
def test_a_broken_link_is_blamed_on_the_quiet_end_or_else_the_younger(speaks: bool) -> None:
    """A dead one's stream may end late on a machine with much load. If the accused has spoken, the younger one goes."""
    job, (first, second, third) = elastic(3)
    job.pass_time(1.0, [first, second, third])
    job.report(second, LOST, 0)
    assert job.pass_time(0.07, [first, second, third] if speaks else [second, third]) == []
    assert ended(job.pass_time(0.02)) == ({second} if speaks else {first})


def test_a_quiet_member_is_not_blamed_if_one_peer_lost_all_its_links() -> None:
    """All links of rank 4 have ended. Rank 0 is well, and has yet to say so."""
    job, members = elastic(5)
    job.pass_time(1.0, members)
    job.report(members[4], LOST, 0)
    for member in members[1:4]:
        job.report(member, LOST, 4)
    effects = job.pass_time(0.5, members[1:])
    assert ended(effects) == {members[4]}
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (4,)


@pytest.mark.parametrize("failure_timeout", [0.5, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("spoken", [False, True])
@pytest.mark.parametrize("reason", [LOST, ErrorReason.ERROR_REASON_COLLECTIVE_MISMATCH])
def test_the_verdict_comes_within_the_members_verdict_timeout(
    failure_timeout: float, spoken: bool, reason: ErrorReason
) -> None:
    """They would name different culprits (I8)."""
    job = PureJob()
    members = [job.join(3, 3, timeout=failure_timeout) for _ in range(3)]
    job.pass_time(0.01)
    job.report(members[1], reason, 0)
    line = Timeline(job)
    if spoken:
        line.at(0.05, lambda: job.do(Heard(members[0], job.state.sessions[members[0]].progress)))
    config = Config(failure_timeout=failure_timeout)
    assert line.run(lambda: job.state.verdict is not None) < config.verdict_timeout


def test_a_broken_link_is_blamed_on_the_end_whose_lease_expired() -> None:
    """Its lease ends at the look at which a broken link is to be judged."""
    job, (first, second, third) = elastic(3)
    job.pass_time(2.9, [second, third])
    job.report(second, LOST, 0)
    job.pass_time(0.1, [second, third])
    assert job.state.verdict is not None
    assert job.state.verdict.culprits == (0,)
    assert second in job.state.sessions
    assert first not in job.state.sessions


def grown(old: int, new: int) -> tuple[PureJob, list[str], list[str]]:
    """Generation 3 has members of generation 2, and newcomers."""
    job, members = elastic(old, most=100)
    newcomers = [job.join(1, 100) for _ in range(new)]
    for member in newcomers:
        job.do(MetOthers(member, Meet(0, Tag(0, 0), False)))
    for member in members:
        job.do(MetOthers(member, Meet(2, Tag(2, 1), True)))
    assert job.state.live is not None
    assert len(job.state.live.newcomers) == new
    return job, members, newcomers


def lose(job: PureJob, member: str, accused: int, *, unopened: bool) -> list[Effect]:
    report = Report(-1, LOST, accused, 0, "its door does not open", unopened)
    return job.do(Reported(member, job.state.generation, report))


@pytest.mark.parametrize("seed", range(20))
def test_newcomers_that_cannot_open_a_link_to_a_hub_are_blamed_not_the_hub(seed: int) -> None:
    chance = random.Random(seed)
    job, members, newcomers = grown(20, 40)
    accusers = chance.sample(newcomers, chance.randint(1, 12))
    effects: list[Effect] = []
    for member in accusers:
        effects += lose(job, member, 0, unopened=True)
    if chance.random() < 0.5:  # the hub itself could not open a link to one that has not reported
        effects += lose(job, members[0], 59, unopened=True)
    effects += job.pass_time(0.3, members)
    assert job.state.verdict is not None
    assert 0 not in job.state.verdict.culprits
    assert set(accusers) <= ended(effects) <= set(newcomers)


@pytest.mark.parametrize("unopened", [True, False])
def test_a_hub_that_an_old_member_has_also_lost_is_blamed(unopened: bool) -> None:
    job, members, newcomers = grown(4, 3)
    effects = lose(job, members[2], 1, unopened=unopened)
    for member in newcomers:
        effects += lose(job, member, 1, unopened=True)
    effects += job.pass_time(0.3, [*members, *newcomers])
    assert ended(effects) == {members[1]}


def test_a_hub_is_blamed_if_several_newcomers_lose_an_open_link_to_it() -> None:
    job, members, newcomers = grown(4, 3)
    effects: list[Effect] = []
    for member in newcomers:
        effects += lose(job, member, 1, unopened=False)
    effects += job.pass_time(0.3, [*members, *newcomers])
    assert ended(effects) == {members[1]}
