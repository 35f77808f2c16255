"""The invariants of a job of replicas: those of a plain job for each lane, and what binds the lanes to each other.

A lane is the ranks with one position in their replicas. Its checks see the coordinator's views as its members do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simulation.broken import Broken
from simulation.checks import Checks
from simulation.replicas import InsideBroken, Replica

from paceline.errors import ReplicaLost
from paceline_protocol import Tag, View, lane
from paceline_protocol.coordinator import JobState
from paceline_protocol.messages import CatchUp, StateLost

if TYPE_CHECKING:
    from simulation.group import Mesh
    from simulation.process import Process
    from simulation.world import World

__all__ = ["LaneChecks"]


class _LineState:
    """The state of a job (`JobState`), as far as it is about the ranks with one position."""

    def __init__(self, state: JobState, position: int) -> None:
        self.view = None if state.view is None else _cut(state.view, position)
        self.sessions = {id_: each for id_, each in state.sessions.items() if each.position == position}
        self._state, self._position = state, position

    def present(self) -> list[Any]:
        return [each for each in self._state.present() if each.position == self._position]

    def met_candidates(self) -> list[Any]:
        return [each for each in self._state.met_candidates() if each.position == self._position]


def _cut(view: View, position: int) -> View:
    """A view, as the ranks with that position see it."""
    size = view.settings.replica_size
    newcomers = tuple(sorted({rank // size for rank in view.newcomers if rank % size == position}))
    return replace(view, seats=tuple(lane(view, position)), newcomers=newcomers)


class LaneChecks(Checks):
    """The checks of all lanes.

    Args:
        world: where.
        strict: see `Checks`.

    Attributes:
        declared: an operator has said that the members of a view are dead, and ranks that live may end by this.
    """

    def __init__(self, world: World, *, strict: bool) -> None:
        super().__init__(world, strict=strict)
        self._lines_of = [Checks(world, strict=strict) for _ in range(world.shape.replica_size)]
        for each in self._lines_of:  # one state has one tag: mates apply the same steps in the same generations
            each._bits = self._bits
        self.declared = False
        self._given: dict[tuple[int, int], object] = {}
        self._closed: dict[tuple[int, Replica], set[Process]] = {}

    @property
    def finished(self) -> tuple[object, ...] | None:  # type: ignore[override]
        """The last step of the lane, once a rank has heard of it."""
        return next((each.finished for each in self._lines_of if each.finished is not None), None)

    @finished.setter
    def finished(self, _: object) -> None:
        pass

    # The coordinator --------------------------------------------------------------------------------------------------

    def forming(self, state: JobState, view: View) -> None:
        size = view.settings.replica_size
        for first in range(0, len(view.seats), size):
            members = [self._world.by_id[seat.member_id] for seat in view.seats[first : first + size]]
            if members != members[0].replica.ranks:
                names = ", ".join(member.name for member in members)
                raise Broken(f"whole: generation {view.generation} has seats for {names}, which is no whole replica")
        for position, checks in enumerate(self._lines_of):
            checks.forming(_LineState(state, position), _cut(view, position))  # type: ignore[arg-type]

    def ordered(self, state: JobState, member_id: str, order: CatchUp) -> None:
        met, mates = state.sessions[member_id].met, self._world.by_id[member_id].replica.ranks
        assert met is not None
        said = [session.met for session in state.sessions.values() if self._world.by_id[session.member_id] in mates]
        if len(said) == len(mates) and all(each is not None and each.tag == met.tag for each in said):
            position = state.sessions[member_id].position
            self._lines_of[position].ordered(_LineState(state, position), member_id, order)  # type: ignore[arg-type]

    def lost(self, state: JobState, member_id: str, told: StateLost) -> None:
        held, position = self._world.by_id[member_id].held, state.sessions[member_id].position
        whole = [replica.ranks for replica in self._world.replicas if replica.is_there]
        if not any(all(rank.held == held for rank in ranks) for ranks in whole):
            self._world.note("K", f"says to {self._world.by_id[member_id].name}: {told.reason}")
            return
        self._lines_of[position].lost(_LineState(state, position), member_id, told)  # type: ignore[arg-type]

    def let_go(self, state: JobState, member_id: str, *, last: bool) -> None:
        position = state.sessions[member_id].position
        self._lines_of[position].let_go(_LineState(state, position), member_id, last=last)  # type: ignore[arg-type]

    def ended(self, process: Process) -> None:
        if isinstance(process.error, ReplicaLost | InsideBroken):
            mates = [mate for mate in process.replica.ranks if mate is not process]
            if all(mate.alive and not mate.leaves and mate.held is not None for mate in mates) and not self.declared:
                raise Broken(f"error: {process.name} ends though all its mates live: {process.error}")
            return
        self._lines_of[process.position].ended(process)

    def told_finished(self) -> None:
        for each in (super(), *self._lines_of):
            each.told_finished()

    def written(self, tag: Tag, state: Any) -> None:
        raise AssertionError("replicas have no checkpoints yet")

    def pushed(self, view: View) -> None:
        for position, checks in enumerate(self._lines_of):
            checks.pushed(_cut(view, position))

    def forgot(self, generation: int) -> None:
        holding = [member for checks in self._lines_of for member in checks.holding(generation)]
        for replica in self._world.replicas:
            states = {rank.held for rank in replica.ranks}  # ranks with different states hold none between them
            if replica.is_there and all(rank in holding for rank in replica.ranks) and len(states) == 1:
                raise Broken(f"I2: generation {generation} is forgotten, and {replica} hold its state")

    # The members ------------------------------------------------------------------------------------------------------

    def contributed(self, states: dict[str, object], mesh: Mesh, step: int) -> None:
        bits = mesh.process.bits
        if self._given.setdefault((mesh.generation, step), bits) != bits:
            raise Broken(
                f"I5: in step {step} of generation {mesh.generation} {mesh.process.name} holds {bits}, and not "
                "what ranks with other positions hold"
            )
        self._lines_of[mesh.process.position].contributed(states, mesh, step)

    def completed(self, states: dict[str, object], mesh: Mesh) -> None:
        self._lines_of[mesh.process.position].completed(states, mesh)

    def applied(self, member: Process, mesh: Mesh, step: int) -> None:
        self._lines_of[member.position].applied(member, mesh, step)

    def closed(self, member: Process) -> None:
        """The closing word is that of a lane; the mates agree after it, or close in another generation."""
        place = member.place
        assert place is not None
        closed = self._closed.setdefault((place.generation, member.replica), set())
        closed.add(member)
        if closed >= set(member.replica.ranks):
            for rank in member.replica.ranks:
                self._lines_of[rank.position].closed(rank)

    def done(self, member: Process) -> None:
        self._lines_of[member.position].done(member)
