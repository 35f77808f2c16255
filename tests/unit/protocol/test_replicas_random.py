"""Random orders of events for a job of replicas: what holds after each, and that training goes on at the end."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from unit.protocol.replicas import BEGINNING, ReplicaJob

from paceline_protocol import Tag
from paceline_protocol.coordinator import DrainAsked, Effect, EndSession, Event, ReplicaLost, Send, Standing, ViewStored
from paceline_protocol.messages import CatchUp, Dismissed, StateLost, Summons, ViewFormed
from pacelinepb.v1.errors_pb2 import ErrorReason

_RUNS = 200
_EVENTS = 40


@dataclass
class Rank:
    """A process, and what it knows."""

    tag: Tag = BEGINNING
    has_base: bool = False
    alive: bool = True
    awake: bool = True
    leaving: bool = False
    dismissed: bool = False
    summoned: bool = False
    told_to_take: CatchUp | None = None
    is_out: bool = False
    """Its session has ended, and it has yet to register again."""


class _Chaos(ReplicaJob):
    """The job with its processes, each of which does what a member does, when its turn comes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ranks: dict[str, Rank] = {}
        self.letters = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
        self.step = 0
        super().__init__(self.random.choice([2, 3]), least=self.random.choice([1, 2]), most=3)
        for _ in range(self.random.choice([2, 3])):
            self.start()

    def start(self) -> None:
        """A launcher starts a replica."""
        for name in self.replica(next(self.letters)):
            self.ranks[name] = Rank(is_out=True)

    def do(self, event: Event) -> list[Effect]:
        """Has the processes take in what they are told."""
        effects = super().do(event)
        self._hear(effects)
        return effects

    def _hear(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case EndSession(member_id, _):
                    name = self.names[member_id]
                    self.ranks[name].is_out |= self.ids[name] == member_id
                case Send(member_id, message):
                    rank = self.ranks[self.names[member_id]]
                    match message:
                        case ViewFormed(base=base):
                            view = self.state.view
                            assert view is not None
                            seat = next(seat for seat in view.seats if seat.member_id == member_id)
                            if base is not None and seat.rank not in view.newcomers:
                                assert rank.tag == base, "a member that is no newcomer holds the base"
                            rank.tag, rank.has_base, rank.told_to_take = base or rank.tag, base is not None, None
                        case CatchUp():
                            rank.told_to_take = message
                        case Summons():
                            rank.summoned = True
                        case Dismissed():
                            rank.dismissed = True
                        case StateLost():
                            rank.tag = BEGINNING

    # What processes do by themselves ----------------------------------------------------------------------------------

    def turn(self, name: str) -> None:
        """A process does what it has to do next, if anything."""
        rank = self.ranks[name]
        if not rank.alive or not rank.awake:
            return
        if name in self.lost or (rank.dismissed and not rank.is_out):
            self.end_replica(name)
            return
        if rank.is_out or not self.is_here(name):
            rank.is_out, rank.told_to_take = False, None
            try:
                self.come(name)
            except ReplicaLost:
                self.end_replica(name)
            return
        session = self.session(name)
        if session.stream is None:
            self.resume(self.ids[name], session.generation, stream=self.random.randrange(10_000, 99_999))
        elif rank.told_to_take is not None:
            order, rank.told_to_take = rank.told_to_take, None
            donors = [self.names[donor.member_id] for donor, _ in order.holders]
            if any(self.ranks[donor].alive and self.ranks[donor].tag == order.base for donor in donors):
                rank.tag = order.base
                rank.has_base = session.generation > 0
            self._meet(name)
        elif not session.has_met and (
            session.standing is not Standing.IN_VIEW or rank.summoned or self._all_must_stop()
        ):
            rank.summoned = False
            self._meet(name)

    def _all_must_stop(self) -> bool:
        live = self.state.live
        return live is not None and (live.base is None or any(session.has_met for session in self.state.of_view()))

    def _meet(self, name: str) -> None:
        rank = self.ranks[name]
        self.meet(name, tag=rank.tag, holds_base=rank.has_base, leaving=rank.leaving)

    def end_replica(self, name: str) -> None:
        """A launcher ends a replica as a whole, and starts another in its place."""
        mates = [each for each in self.replica(name[0]) if self.ranks[each].alive]
        for mate in mates:
            self.kill(mate)
        self.start()

    def kill(self, name: str, *, reported: bool = True) -> None:
        """A process is killed, and its launcher says so, or it is too late or dead itself."""
        self.ranks[name].alive = False
        if name in self.ids and reported:
            self.dies(name)
        elif name in self.ids and self.is_here(name) and self.session(name).stream is not None:
            self.cut(self.ids[name])

    # What happens to them ---------------------------------------------------------------------------------------------

    def happens(self) -> None:
        """Something happens to somebody."""
        living = [name for name, rank in self.ranks.items() if rank.alive]
        name = self.random.choice(living)
        rank, here = self.ranks[name], not self.ranks[name].is_out and name in self.ids and self.is_here(name)
        match self.random.randrange(16):
            case 0 if sum(self.ranks[each].alive for each in self.replica(name[0])) == self.size:
                self.kill(name, reported=self.random.random() < 0.5)
            case 6:
                self.restarts_coordinator()
            case 8:
                self.slow_disk = not self.slow_disk
                self.finishes_storing()
            case 7 if here and self.state.forming is None and self.session(name).standing is Standing.IN_VIEW:
                others = range(len(self.seats()) // self.size)
                reason = self.random.choice([ErrorReason.ERROR_REASON_PEER_LOST, ErrorReason.ERROR_REASON_TIMEOUT])
                self.report(self.ids[name], reason, self.random.choice(others))
            case 1:
                rank.awake = not rank.awake
            case 2 if here and self.session(name).stream is not None:
                self.cut(self.ids[name])
            case 3:
                self.beat_all(self.random.choice([0.1, 1.0, 4.0]))
            case 4 if here:
                self.do(DrainAsked((self.ids[name],), "drained"))
                for mate in self.replica(name[0]):
                    self.ranks[mate].leaving = True
                self.start()
                self._meet_if_in_view(name)
            case 5 if self.state.live is not None and self.state.live.base is not None:
                self._commit()
            case _:
                self.turn(name)

    def finishes_storing(self) -> None:
        """The disk has caught up, if it was slow."""
        if not self.slow_disk and self.state.forming is not None:
            self.do(ViewStored(self.state.forming.generation))

    def _meet_if_in_view(self, name: str) -> None:
        if self.session(name).standing is Standing.IN_VIEW and self.session(name).stream is not None:
            self._meet(name)

    def _commit(self) -> None:
        """A step: all replicas apply it, or only some of them before a member is lost."""
        live = self.state.live
        assert live is not None
        names = self.seats()
        inside = [self.ranks[name] for name in names]
        if not all(rank.alive and rank.awake and rank.has_base for rank in inside):
            return
        if any(session.has_met for session in self.state.of_view()) or len(self.state.of_view()) < len(names):
            return
        self.step += 1
        letters = sorted({name[0] for name in names})
        first = self.random.choice(letters)
        applied = letters if self.random.random() < 0.7 else [first]
        for name in names:
            if name[0] in applied:
                self.ranks[name].tag = Tag(live.generation, live.base.step + self.step if live.base else self.step)
        if applied != letters:
            self.kill(self.random.choice([name for name in names if name[0] != first]))

    def beat_all(self, seconds: float) -> None:
        """Passes time, in which every rank that is alive, awake and connected sends its heartbeats."""
        for _ in range(max(1, round(seconds / 0.5))):
            heard = [self.ids[name] for name, rank in self.ranks.items() if self._beats(name, rank)]
            self.pass_time(min(seconds, 0.5), heard)

    def _beats(self, name: str, rank: Rank) -> bool:
        return (
            rank.alive
            and rank.awake
            and name in self.ids
            and self.is_here(name)
            and (self.session(name).stream is not None)
        )

    def calms_down(self) -> None:
        """Everybody is awake, what is broken is started again, and all do what they have to."""
        self.slow_disk = False
        self.finishes_storing()
        for rank in self.ranks.values():
            rank.awake = True
        for _ in range(40):
            for name in list(self.ranks):
                rank = self.ranks[name]
                if not rank.alive:
                    self.kill(name)
                    if any(self.ranks[mate].alive for mate in self.replica(name[0])):
                        self.end_replica(name)
                self.turn(name)
            self.beat_all(1.0)


@pytest.mark.parametrize("part", range(10))
def test_random_events_end_with_a_view_of_complete_replicas(part: int) -> None:
    for seed in range(part * _RUNS // 10, (part + 1) * _RUNS // 10):
        job = _Chaos(seed)
        for _ in range(_EVENTS):
            job.happens()
        job.calms_down()
        living = [name for name, rank in job.ranks.items() if rank.alive]
        assert job.seats(), f"seed {seed}: {job.reason}"
        well = {name[0] for name in living if all(job.ranks[mate].alive for mate in job.replica(name[0]))}
        assert len(job.seats()) == min(len(well), job.most) * job.size, f"seed {seed}: {job.reason}"
        assert job.state.live is not None
        assert job.state.live.base is not None, f"seed {seed}: {job.reason}"
        assert {*job.seats()} <= {*living}
