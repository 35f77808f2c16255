"""The invariants, looked at from above: the checks know what everybody holds, which no one in the protocol does.

I1 and I2 are checked on facts: a step is committed when every member of its generation has applied it, whether anybody
knows it or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation.broken import Broken
from simulation.hosting import Hosting
from simulation.shares import is_all

from paceline.checkpoint.tag import Tag
from paceline.elastic.share import Share, share_of
from paceline_server.effects import PushCatchUp, PushStateLost
from paceline_server.model import JobState, Standing, View

if TYPE_CHECKING:
    from simulation.member import Member
    from simulation.world import World

__all__ = ["Checks"]


class Checks:
    """What has happened so far, and what must not happen now.

    Args:
        world: where.
        strict: the coordinator's disk is never lost. If it is, another line may begin, and only I5 is checked.
    """

    def __init__(self, world: World, *, strict: bool) -> None:
        self._world = world
        self._strict = strict
        self._views: dict[int, View] = {}
        self._pushed: dict[int, View] = {}
        self._bits: dict[tuple[int, int], tuple[object, ...]] = {(0, 0): ()}
        self._lines: dict[int, int] = {}
        self._line = 0
        self._line_began = 0.0
        self._gave_at: dict[int, float] = {}
        self._applied: dict[tuple[int, int], set[str]] = {}
        self._had: list[tuple[Member, Share]] = []
        self._let_go: dict[str, Tag | None] = {}
        self._hosting = Hosting(world.shape.node_size)
        self.committed: tuple[object, ...] = ()
        self.finished: tuple[object, ...] | None = None
        self.promised = False

    # The coordinator --------------------------------------------------------------------------------------------------

    def forming(self, state: JobState, view: View) -> None:
        """A view is given to the disk."""
        if not self._strict:
            return
        if self.promised and view.base is None:
            raise Broken("I1: the line was finished, and another one begins")
        self._views[view.generation] = view
        before = state.view
        if view.base is None:
            self._lines.pop(view.generation, None)
            return
        if before is None:
            raise Broken(f"I2: generation {view.generation} has a base and no generation before it")
        self._check_base(state, before, view)
        self._hosting.forming(before, view)
        base = self._bits[view.base]
        if before.base is None:
            self._line += 1
            self._line_began = self._world.clock.now
            self.committed, self._had = base, []
        elif base[: len(self.committed)] != self.committed and not self._is_known_in(view):
            raise Broken(f"I1: {self.committed} was committed, and generation {view.generation} starts from {base}")
        self._lines[view.generation] = self._line

    def _is_known_in(self, view: View) -> bool:
        """True if a member that is counted on to hold the base holds all that is committed: it will say so."""
        for seat in view.seats:
            bits = self._world.by_id[seat.member_id].bits
            if seat.rank not in view.newcomers and bits[: len(self.committed)] == self.committed:
                return True
        return False

    def _check_base(self, state: JobState, before: View, view: View) -> None:
        """I2, said once more in other words."""
        old = {seat.member_id for seat in before.seats}
        holders = []
        for seat in view.seats:
            session = state.sessions[seat.member_id]
            met = session.met
            assert met is not None
            holds = seat.member_id in old and met.generation == before.generation and met.tag is not None
            if holds and (met.holds_base or before.base is None):
                holders.append(met.tag)
            spread = self._world.shape.node_size != 1
            if (seat.rank not in view.newcomers or spread) and met.tag != view.base:
                raise Broken(f"I2: {seat.process.host} is to start from {view.base} and holds {met.tag}")
            if spread and share_of(seat.rank, len(view.seats), self._world.shape.node_size) not in met.shares:
                raise Broken(f"I2: {seat.process.host} is to have seat {seat.rank}, and holds {met.shares}")
        leavers = [
            s.met.tag
            for s in state.sessions.values()
            if s.met is not None and s.met.leaving and s.member_id in old and s.met.tag is not None
        ]
        if not holders:
            raise Broken(f"I2: generation {view.generation} has no member of {before.generation} that holds its base")
        greatest = max([*holders, *leavers])
        if self._world.shape.node_size != 1:
            assert view.base is not None
            if view.base < greatest and self._world.has_all(Tag(*greatest), self._heard(state)):
                raise Broken(
                    f"I2: all of {greatest} is there, and generation {view.generation} starts from {view.base}"
                )
        elif view.base != greatest:
            raise Broken(f"I2: generation {view.generation} starts from {view.base}, not from {max(holders)}")

    def _heard(self, state: JobState) -> list[Member]:
        """Who could bring what it holds: not those who may go, for the others have had time to take it."""
        staying = [s.member_id for s in state.sessions.values() if s.standing is not Standing.DISMISSED]
        return [self._world.by_id[id_] for id_ in staying if self._world.by_id[id_].answers_as(id_)]

    def ordered(self, state: JobState, order: PushCatchUp) -> None:
        """A member is told to take a state: not in place of a later one of which all is there."""
        met, view = state.sessions[order.member_id].met, state.view
        assert met is not None
        assert view is not None
        self._hosting.ordered(self._world.clock.now, state, order)
        leads = met.generation > 0 and (met.holds_base or view.base is None)
        if not self._strict or not leads or met.tag is None or met.tag <= order.base:
            return
        if self._world.has_all(Tag(*met.tag), self._heard(state)):
            raise Broken(f"I2: all of {met.tag} is there, and {order.member_id} is to take {order.base}")

    def lost(self, state: JobState, told: PushStateLost) -> None:
        """A member is told that nobody has the rest of what it holds."""
        member = self._world.by_id[told.member_id]
        self._world.note("K", f"says to {member.name}: {told.reason}")
        held = member.place.held
        if not self._strict or held in (None, Tag(0, 0)) or not member.answers_as(told.member_id):
            return  # what others built for themselves has the same tag
        had = [share for each, share in self._had if each.alive]
        if is_all(had) and all(each.place.held for each, _ in self._had):
            raise Broken(f"I1: nobody who had a part of {self.committed} has ended, and {held} is said to be lost")
        if self._world.has_all(held, self._heard(state)):  # type: ignore[arg-type]
            raise Broken(f"I2: members hold all of {held} between them, and {member.name} is told that it is lost")

    def let_go(self, state: JobState, member_id: str) -> None:
        """A member is told that it may go, for others have what it said that it holds."""
        session, view = state.sessions[member_id], state.view
        tag = None if session.met is None or session.met.tag is None else Tag(*session.met.tag)
        self._let_go[member_id] = tag
        if view is None or view.generation != session.generation or self._world.shape.node_size == 1:
            return
        others = [self._world.by_id[each.member_id] for each in [*state.present(), *state.bringing()]]
        all_ = [*others, self._world.by_id[member_id]]
        if tag is None or tag == (0, 0) or tag <= self._world.checkpoint[0]:
            return
        if state.present() and self._world.has_all(tag, all_) and not self._world.has_all(tag, others):
            raise Broken(f"I1: {session.process.host} may go with a part of {tag}, which others have not taken")

    def dismissed(self, member: Member, *, last: bool) -> None:
        """A member goes that has a part of the state: others have taken what is committed, or all write it together."""
        held, spread = member.place.held, self._world.shape.node_size != 1
        if not self._strict or not spread or held is None or member.bits != self.committed:
            return
        if not last and held != self._let_go[member.member_id]:
            raise Broken(f"I1: {member.name} leaves with a part of {held}, which others need")
        written = member.place.stored or held <= self._world.checkpoint[0]
        if last and member.void and not written and self._world.has_all(held, self._world.living()):
            raise Broken(f"I1: all leave, hold all of {held} between them, and cannot write it together any more")

    def told_finished(self) -> None:
        """A member is told that the line is done: this must hold from now on."""
        self.promised = True

    def pushed(self, view: View) -> None:
        """A member is told of a view."""
        known = self._pushed.setdefault(view.generation, view)
        if self._strict and known != view:
            raise Broken(f"I3: generation {view.generation} is the number of two views")

    def forgot(self, generation: int) -> None:
        """The coordinator forgets a view: nobody may hold the line's state in it any more."""
        view = self._views.get(generation)
        if not self._strict or view is None or view.base is None:
            return
        holding = []
        for seat in view.seats:
            member = self._world.by_id.get(seat.member_id)
            if member is None or not member.alive or member.member_id != seat.member_id or member.place.held is None:
                continue
            unaware = member.place.generation < generation and seat.rank not in view.newcomers
            ahead = seat.rank not in view.newcomers or member.place.held > view.base
            holds = member.place.generation == generation and member.place.holds_base and ahead
            if (unaware or holds) and not member.place.leaving:
                holding.append(member)
        if any(is_all([s for m in holding for s in m.could_give(each.place.held)]) for each in holding):  # type: ignore[arg-type]
            names = ", ".join(member.name for member in holding)
            raise Broken(f"I2: generation {generation} is forgotten, and {names} hold its state")

    def refused(self, member: Member, event: Any, why: Exception) -> None:
        """A member of a session was told that what it says cannot be."""
        raise Broken(f"{member.name} is refused for {type(event).__name__}: {why}")

    # The members ------------------------------------------------------------------------------------------------------

    def contributed(self, states: dict[str, object], member: Member, view: View, step: int) -> None:
        """A member's part of a step sets out."""
        self._gave_at[view.generation] = self._world.clock.now
        if member.member_id in states:
            raise Broken(f"I1: {member.name} gives twice to step {step} of generation {view.generation}")
        for other, bits in states.items():
            if bits != member.bits:
                name = self._world.by_id[other].name
                raise Broken(
                    f"I5: in step {step} of generation {view.generation} {name} holds {bits} and {member.name} "
                    f"{member.bits}"
                )
        parts = member.state.parts
        if any(bits != member.bits for bits in parts.values()) or set(parts) != set(member.place.shares):
            raise Broken(f"I5: {member.name} holds {member.bits}, and of it {parts}")
        if len(member.bits) != step - 1:
            raise Broken(f"I6: {member.name} gives to step {step}, and holds {member.bits}")

    def completed(self, states: dict[str, object], view: View, member: Member) -> None:
        """All collectives of a step have completed at a member."""
        if set(states) != {seat.member_id for seat in view.seats}:
            raise Broken(f"I1: a step of generation {view.generation} completes at {member.name} without all of it")
        if member.bits == self.committed:  # now each has but the share of its seat
            world, node_size = len(view.seats), self._world.shape.node_size
            members = [self._world.by_id[seat.member_id] for seat in view.seats]
            self._had = [(each, share_of(rank, world, node_size)) for rank, each in enumerate(members)]

    def applied(self, member: Member, view: View, step: int) -> None:
        """A member has applied a step."""
        if not self._strict:
            return
        tag = (view.generation, step)
        known = self._bits.setdefault(tag, member.bits)
        if known != member.bits:
            raise Broken(f"I5: {tag} is {known}, and {member.name} makes {member.bits} of it")
        appliers = self._applied.setdefault(tag, set())
        appliers.add(member.member_id)
        if len(appliers) == len(view.seats):
            self._commit(view, member.bits)

    def _commit(self, view: View, bits: tuple[object, ...]) -> None:
        if self._lines.get(view.generation) != self._line:
            if self._gave_at[view.generation] <= self._line_began:
                return  # it woke, and did what had been given to long before: nothing comes of it
            raise Broken(f"two lines: {bits} is committed in a line that is over")
        shorter = min(len(bits), len(self.committed))
        if bits[:shorter] != self.committed[:shorter]:
            raise Broken(f"two lines: {self.committed} was committed, and now {bits}")
        if len(bits) > len(self.committed):
            self.committed, self._had = bits, []  # who has a part of this, the next word tells
            self._world.committed(Tag(view.generation, len(bits)), bits)
        latest = max(self._lines)
        base = self._views[latest].base
        assert base is not None
        ahead = latest > view.generation and not self._is_known_in(self._views[latest])
        if ahead and self._bits[base][: len(bits)] != bits[: len(self._bits[base])]:
            raise Broken(f"I1: {bits} is committed, and generation {latest} starts from {base}")

    def closed(self, member: Member) -> None:
        """The closing word has completed at a member."""
        if len(member.bits) != self._world.last_step:
            raise Broken(f"I6: the line is finished with {member.bits}")
        if self._strict and self.finished not in (None, member.bits):
            raise Broken(f"I6: the line is finished with {self.finished} and with {member.bits}")
        self.finished = member.bits
