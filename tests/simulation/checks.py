"""The invariants, looked at from above: the checks know what everybody holds, which no one in the protocol does.

I1 and I2 are checked on facts: a step is committed when every member of its generation has applied it, whether anybody
knows it or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulation.broken import Broken
from simulation.hosting import Hosting
from simulation.process import RaisedByUser
from simulation.state import Spoiled, is_all
from simulation.training import Training

from paceline import errors
from paceline._elastic.recovery import COPIES_VERSION
from paceline_protocol import Share, Tag, View, share_of
from paceline_protocol.coordinator import JobState, Standing
from paceline_protocol.messages import CatchUp, StateLost
from paceline_server.errors import BadRequest, Refused

if TYPE_CHECKING:
    from simulation.group import Mesh
    from simulation.network import Stream
    from simulation.process import Process
    from simulation.world import World

__all__ = ["Checks"]


class Checks:
    """What has happened so far, and what must not happen now.

    Args:
        world: where.
        strict: the coordinator's disk is never lost. If it is, another line may begin, and only I5 is checked.

    Attributes:
        broken: a breach that the runner is to raise.
    """

    def __init__(self, world: World, *, strict: bool) -> None:
        self._world = world
        self._strict = strict
        self._unheard = False
        self._views: dict[int, View] = {}
        self._pushed: dict[int, View] = {}
        self._bits: dict[tuple[int, int], tuple[object, ...]] = {(0, 0): ()}
        self._lines: dict[int, int] = {}
        self._line = 0
        self._line_began = 0.0
        self._gave_at: dict[int, float] = {}
        self._applied: dict[tuple[int, int], set[str]] = {}
        self._had: list[tuple[Process, Share]] = []
        self._have_copies = False
        self._let_go: dict[str, tuple[Tag | None, bool]] = {}
        self._written: dict[Tag, object] = {}
        self._hosting = Hosting(world.shape.node_size)
        self.committed: tuple[object, ...] = ()
        self.finished: tuple[object, ...] | None = None
        self._last_holders: list[Process] = []  # who had the last state when a member heard that all have it
        self.promised = False
        self.broken: Broken | None = None

    # The coordinator --------------------------------------------------------------------------------------------------

    def first(self, view: View) -> None:
        """The first view of all: it has all that one launcher has started, unless one of them has ended."""
        started = self._world.first()
        wanted = self._world.most * self._world.shape.replica_size
        if self._world.shape.launched and len(view.seats) < wanted and all(each.alive for each in started):
            raise Broken(f"the first view has {len(view.seats)} of {wanted} workers that one launcher started")

    def forming(self, state: JobState, view: View) -> None:
        """A view is given to the disk."""
        brought = [state.sessions[seat.member_id].met for seat in view.seats]
        tags = [met.tag for met in brought if met is not None and met.tag is not None]
        if any(tag.generation >= view.generation for tag in tags):
            raise Broken(f"I3: generation {view.generation} would make tags that may be there: {tags} are brought")
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
            if view.base == (0, 0) and not view.lost and any(told.base is not None for told in self._pushed.values()):
                raise Broken(
                    f"generation {view.generation} begins at step 1 again, and nobody is told that a line is lost"
                )
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
                raise Broken(f"I2: {seat.short_label} is to start from {view.base} and holds {met.tag}")
            if spread and share_of(seat.rank, len(view.seats), self._world.shape.node_size) not in met.shares:
                raise Broken(f"I2: {seat.short_label} is to have seat {seat.rank}, and holds {met.shares}")
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

    def _heard(self, state: JobState) -> list[Process]:
        """Who could bring what it holds: not those who may go, for the others have had time to take it."""
        staying = [s.member_id for s in state.sessions.values() if s.standing is not Standing.DISMISSED]
        return [self._world.by_id[id_] for id_ in staying if self._world.by_id[id_].answers_as(id_)]

    def ordered(self, state: JobState, member_id: str, order: CatchUp) -> None:
        """A member is told to take a state: not in place of a later one of which all is there."""
        met, view = state.sessions[member_id].met, state.view
        assert met is not None
        assert view is not None
        self._hosting.ordered(self._world.clock.now, state, member_id, order)
        leads = met.generation > 0 and (met.holds_base or view.base is None)
        if not self._strict or not leads or met.tag is None or met.tag <= order.base:
            return
        if self._world.has_all(Tag(*met.tag), self._heard(state)):
            raise Broken(f"I2: all of {met.tag} is there, and {member_id} is to take {order.base}")

    def lost(self, state: JobState, member_id: str, told: StateLost) -> None:
        """A member is told that nobody has the rest of what it holds."""
        member = self._world.by_id[member_id]
        self._world.note("K", f"says to {member.name}: {told.reason}")
        held = member.held
        if not self._strict or held in (None, Tag(0, 0)) or not member.answers_as(member_id):
            return  # what others built for themselves has the same tag
        had = [share for each, share in self._had if each.alive and not each.leaves]
        if is_all(had) and all(each.held for each, _ in self._had):
            raise Broken(f"I1: nobody who had a part of {self.committed} has ended, and {held} is said to be lost")
        gone = sum(not each.alive or each.leaves or each.held is None for each, _ in self._had)
        if self._had and self._have_copies and gone < self._world.shape.redundancy:
            raise Broken(f"I1: {gone} who had a part of {self.committed} have ended, and {held} is said to be lost")
        if self._world.has_all(held, self._heard(state)):  # type: ignore[arg-type]
            raise Broken(f"I2: members hold all of {held} between them, and {member.name} is told that it is lost")

    def let_go(self, state: JobState, member_id: str, *, last: bool) -> None:
        """A member is told that it may go, for others have what it said that it holds."""
        session, view = state.sessions[member_id], state.view
        tag = None if session.met is None or session.met.tag is None else Tag(*session.met.tag)
        self._let_go[member_id] = tag, last
        if view is None or view.generation != session.generation or self._world.shape.node_size == 1:
            return
        others = [self._world.by_id[each.member_id] for each in [*state.present(), *state.met_candidates()]]
        all_ = [*others, self._world.by_id[member_id]]
        if tag is None or tag == (0, 0) or tag <= self._world.files.greatest():
            return
        if state.present() and self._world.has_all(tag, all_) and not self._world.has_all(tag, others):
            name = self._world.by_id[member_id].name
            raise Broken(f"I1: {name} may go with a part of {tag}, which others have not taken")

    def ended(self, process: Process) -> None:
        """A process has come to its end by itself."""
        error = process.error
        if error is not None and not self._is_justified(process, error):
            raise Broken(f"error: {process.name} ends with {type(error).__name__}: {error}")
        known = self._let_go.get(process.ids[-1]) if process.ids else None
        if known is not None and known[0] is not None and process.place is not None:
            self._dismissed(process, *known)

    def _is_justified(self, process: Process, error: BaseException) -> bool:
        """True if what strikes in this schedule explains an error."""
        if process.place is None or isinstance(error, RaisedByUser | Spoiled):
            return True  # what fails in `join` is the launcher's to try again
        if isinstance(error, errors.OrphanedError):  # what it held was not whole, or the state of the line is lost
            if process.is_rank and (process.held == Tag(0, 0) or len({m.held for m in process.replica.ranks}) > 1):
                return True  # what others built for themselves has the same tag; or its replica is of no use
            return process.held is None or self._world.shape.node_size != 1
        if isinstance(error, errors.CheckpointFailed):
            return self._world.files.has_refused
        if isinstance(error, errors.StepOrderError):  # a second update would be of what the first has left
            return process.went_on and self._world.shape.twice
        if isinstance(error, errors.SettingsMismatch):  # its predecessor's session has not ended yet
            return self._world.shape.claimed
        if isinstance(error, errors.SessionClosed):  # before its steps began: it does not come back by itself then
            return not process.group._vouched
        return False

    def _dismissed(self, member: Process, said: Tag | None, last: bool) -> None:
        """A member goes that has a part of the state: others have taken what is committed, or all write it together."""
        place = member.place
        assert place is not None
        held, spread = place.held, self._world.shape.node_size != 1
        if not self._strict or not spread or held is None or member.bits != self.committed:
            return
        if not last and held != said:
            raise Broken(f"I1: {member.name} leaves with a part of {held}, which others need")
        written = place.stored or held <= self._world.files.greatest() or not self._world.shape.directory
        if last and member.void and not written and self._world.has_all(held, self._world.living()):
            raise Broken(f"I1: all leave, hold all of {held} between them, and cannot write it together any more")

    def told_finished(self) -> None:
        """A member is told that the line is done: this must hold from now on, and what it was for must be there."""
        world = self._world
        kept = not world.shape.directory or world.files.has_refused or world.files.has_step(world.last_step)
        if not kept and self._strict:
            raise Broken("durability: the line is said to be finished, and no disk has its last state")
        self.promised = True

    def written(self, tag: Tag, state: Any) -> None:
        """A checkpoint is there."""
        known = self._written.setdefault(tag, state["bits"])
        if known != state["bits"]:
            # The saver would take what is raised here for a disk that refuses.
            self.broken = Broken(f"I3: the checkpoint {tuple(tag)} is of {known}, and of {state['bits']}")

    def pushed(self, view: View) -> None:
        """A member is told of a view: it is stored, and no other has its number."""
        stored = self._world.coordinator.stored.generation
        if stored < view.generation and self._strict:
            raise Broken(f"I3: generation {view.generation} is announced, and generation {stored} is stored")
        newest = min(self._world.by_id[seat.member_id].newest for seat in view.seats)
        if view.version != newest:
            raise Broken(f"versions: generation {view.generation} speaks {view.version}, and its members {newest}")
        known = self._pushed.setdefault(view.generation, view)
        if self._strict and known != view:
            raise Broken(f"I3: generation {view.generation} is the number of two views")

    def forgot(self, generation: int) -> None:
        """The coordinator forgets a view: nobody may hold the line's state in it any more."""
        holding = self.holding(generation)
        if any(is_all([s for m in holding for s in m.could_give(each.held)]) for each in holding):  # type: ignore[arg-type]
            names = ", ".join(member.name for member in holding)
            raise Broken(f"I2: generation {generation} is forgotten, and {names} hold its state")

    def holding(self, generation: int) -> list[Process]:
        """Members that hold the line's state in a generation."""
        view = self._views.get(generation)
        if not self._strict or view is None or view.base is None:
            return []
        holding = []
        for seat in view.seats:
            member = self._world.by_id.get(seat.member_id)
            place = member.place if member is not None and member.answers_as(seat.member_id) else None
            if member is None or place is None or place.held is None or member.leaves:
                continue
            unaware = place.generation < generation and seat.rank not in view.newcomers
            ahead = seat.rank not in view.newcomers or place.held > view.base
            holds = place.generation == generation and place.holds_base and ahead
            if (unaware or holds) and not place.leaving:
                holding.append(member)
        return holding

    def refused(self, stream: Stream, why: Refused) -> None:
        """A stream ends with a refusal: not for what a member of a session says."""
        if stream.member_id and isinstance(why, BadRequest):
            raise Broken(f"refused: {stream.process.name} is told: {why}")

    # The members ------------------------------------------------------------------------------------------------------

    def contributed(self, states: dict[str, object], mesh: Mesh, step: int) -> None:
        """A member's part of a step sets out."""
        member = mesh.process
        self._gave_at[mesh.generation] = self._world.clock.now
        for other, bits in states.items():
            if bits != member.bits:
                name = self._world.by_id[other].name
                raise Broken(
                    f"I5: in step {step} of generation {mesh.generation} {name} holds {bits} and {member.name} "
                    f"{member.bits}"
                )
        parts, place = member.state.parts, member.place
        assert place is not None
        if any(bits != member.bits for bits in parts.values()) or set(parts) != set(place.shares):
            raise Broken(f"I5: {member.name} holds {member.bits}, and of it {parts}")
        self._compare_with_one_process(member)
        if len(member.bits) != step - 1:
            raise Broken(f"I6: {member.name} gives to step {step}, and holds {member.bits}")

    def completed(self, states: dict[str, object], mesh: Mesh) -> None:
        """The collective with a step's word has completed at a member."""
        if set(states) != {peer.member_id for peer in mesh.peers}:
            raise Broken(
                f"I1: a step of generation {mesh.generation} completes at {mesh.process.name} without all of it"
            )
        if mesh.process.bits == self.committed:  # now each has but the share of its seat
            node_size = self._world.shape.node_size
            members = [self._world.by_id[peer.member_id] for peer in mesh.peers]
            self._had = [(each, share_of(rank, mesh.size, node_size)) for rank, each in enumerate(members)]
            self._have_copies = mesh.version >= COPIES_VERSION

    def applied(self, member: Process, mesh: Mesh, step: int) -> None:
        """A member has applied a step: all that it called in it is complete."""
        group = member.group
        if group._core.mesh is mesh and group.is_busy and not mesh.fault.failed:
            raise Broken(f"I1: {member.name} applies step {step} before its gradients have come")
        self._compare_with_one_process(member)
        if not self._strict:
            return
        tag = (mesh.generation, step)
        known = self._bits.setdefault(tag, member.bits)
        if known != member.bits:
            raise Broken(f"I5: {tag} is {known}, and {member.name} makes {member.bits} of it")
        appliers = self._applied.setdefault(tag, set())
        appliers.add(member.ids[-1])
        if len(appliers) == mesh.size:
            self._commit(mesh.generation, member.bits)

    def _compare_with_one_process(self, member: Process) -> None:
        """The state is that of a process that computes all microbatches of all steps itself, each once."""
        state = member.state
        if isinstance(state, Training) and not state.is_as_expected:
            raise Broken(f"I6: {member.name} has other numbers after step {state.step} than one process alone")

    def _commit(self, generation: int, bits: tuple[object, ...]) -> None:
        if self._lines.get(generation) != self._line:
            if self._gave_at[generation] <= self._line_began:
                return  # it woke, and did what had been given to long before: nothing comes of it
            raise Broken(f"two lines: {bits} is committed in a line that is over")
        shorter = min(len(bits), len(self.committed))
        if bits[:shorter] != self.committed[:shorter]:
            raise Broken(f"two lines: {self.committed} was committed, and now {bits}")
        if len(bits) > len(self.committed):
            self.committed, self._had = bits, []  # who has a part of this, the next word tells
        latest = max(self._lines)
        base = self._views[latest].base
        assert base is not None
        ahead = latest > generation and not self._is_known_in(self._views[latest])
        if ahead and self._bits[base][: len(bits)] != bits[: len(self._bits[base])]:
            raise Broken(f"I1: {bits} is committed, and generation {latest} starts from {base}")

    def closed(self, member: Process) -> None:
        """The closing word has completed at a member."""
        if len(member.bits) != self._world.last_step:
            raise Broken(f"I6: the line is finished with {member.bits}")
        lost = self._world.files.has_refused or self._unheard or all(each.is_lost for each in self._last_holders)
        anew = not self.promised and lost  # nobody has that state any more
        if self._strict and self.finished not in (None, member.bits) and not anew:
            raise Broken(f"I6: the line is finished with {self.finished} and with {member.bits}")
        self.finished = member.bits
        self._last_holders = [each for each in self._world.members if each.bits == member.bits]

    def done(self, member: Process) -> None:
        """A member has come to the end of its steps."""
        if len(member.bits) != self._world.last_step:
            raise Broken(f"I6: {member.name} is done with {member.bits}")
        self._unheard |= not self.promised  # the coordinator was away for so long that it did not wait any more
