"""A job of replicas without sockets, whose ranks have names: "A0" is the rank at position 0 of replica A."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from paceline_protocol import Meet, Process, Tag, View, lane
from paceline_protocol.coordinator import (
    Effect,
    EndSession,
    Event,
    ExitReported,
    Membership,
    MetOthers,
    ReplicaLost,
    Send,
    StoreView,
    restore,
)
from paceline_protocol.messages import CatchUp, Mismatch, Running, ViewFormed
from paceline_server.settings import ServerSettings
from support.coordinator import PureJob

__all__ = ["BEGINNING", "ReplicaJob"]

BEGINNING = Tag(0, 0)


class ReplicaJob(PureJob):
    """A job of replicas of `size` ranks. After each event it checks what must hold of everything that is sent.

    Attributes:
        ids: the last member id of each rank, by its name.
        lost: the ranks whose replica was lost, by name, each with what it was told.
    """

    def __init__(self, size: int = 2, *, least: int = 1, most: int = 3) -> None:
        self.size, self.least, self.most = size, least, most
        self.ids: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        super().__init__()

    # What happens -----------------------------------------------------------------------------------------------------

    def come(self, *ranks: str, **claim: Any) -> None:
        """Ranks register. Those that were here before say so."""
        for name in ranks:
            position, size = int(name[1:]), claim.pop("size", self.size)
            # Its id is known before its effects are checked.
            self.ids[name], former = f"m{self._count + 1}", self.ids.get(name, "")
            self.names[self.ids[name]] = name
            self.join(
                **{"least": self.least, "most": self.most, "former": former, **claim},
                host=f"host-{name}",
                pid=100 + position,
                replica=name[0],
                position=position,
                size=size,
            )

    def replica(self, *replicas: str) -> list[str]:
        """The ranks of replicas."""
        return [f"{letter}{position}" for letter in replicas for position in range(self.size)]

    def meet(self, *ranks: str, tag: Tag | None = BEGINNING, **fields: Any) -> list[Effect]:
        """Ranks stop and say what they hold."""
        effects: list[Effect] = []
        for name in ranks:
            generation = self.session(name).generation
            met = Meet(generation, tag, holds_base=fields.pop("holds_base", generation > 0), **fields)
            effects += self.do(MetOthers(self.ids[name], met))
        return effects

    def trains(self, *replicas: str) -> None:
        """Replicas come, meet, and are in a view with a base."""
        self.come(*self.replica(*replicas))
        if self.state.live is None:
            self.pass_time(1.0, list(self.ids.values()))
        self.meet(*self.replica(*replicas))
        assert self.seats() == self.replica(*replicas), self.reason

    def dies(self, *ranks: str) -> list[Effect]:
        """A launcher sees processes end by SIGKILL."""
        processes = [Process(f"host-{name}", 100 + int(name[1:])) for name in ranks]
        return [effect for process in processes for effect in self.do(ExitReported(process, -9))]

    def falls_silent(self, *ranks: str) -> None:
        """The streams of ranks end, and they do not come back in time."""
        for name in ranks:
            self.cut(self.ids[name])
        others = [member_id for member_id, session in self.state.sessions.items() if session.stream is not None]
        for _ in range(8):
            self.pass_time(0.5, [each for each in others if each in self.state.sessions])
        assert not any(self.ids[name] in self.state.sessions for name in ranks)

    def restarts_coordinator(self) -> None:
        """The coordinator is killed and started again; everything was stored, and all streams have ended."""
        state = self.state
        stored = restore(
            self.now,
            "job",
            generation=state.generation,
            view=state.view,
            verdict=state.verdict,
            endings={rank: replace(ending, lives=False) for rank, ending in state.endings.items()},
            finished=state.finished,
            reached=state.reached,
        )
        self.membership = Membership(stored, ServerSettings())

    # What is ----------------------------------------------------------------------------------------------------------

    def session(self, name: str) -> Any:
        """The session of a rank."""
        return self.state.sessions[self.ids[name]]

    def is_here(self, name: str) -> bool:
        """True if the last session of a rank has not ended."""
        return self.ids[name] in self.state.sessions

    def seats(self) -> list[str]:
        """The ranks of the live view, in its order."""
        return [self.names[seat.member_id] for seat in self.state.live.seats] if self.state.live is not None else []

    def told(self, effects: Iterable[Effect], kind: type) -> dict[str, Any]:
        """The messages of one kind, by the names of their receivers."""
        return {
            self.names[each.member_id]: each.message
            for each in effects
            if isinstance(each, Send) and isinstance(each.message, kind)
        }

    # What must hold ---------------------------------------------------------------------------------------------------

    def do(self, event: Event) -> list[Effect]:
        """Gives an event, and checks the effects that it has at once."""
        effects = super().do(event)
        for effect in effects:
            match effect:
                case StoreView(view):
                    self._check_view(view)
                case EndSession(member_id, ReplicaLost() as refusal):
                    assert member_id not in map(self.ids.get, self.lost), "a rank is told once"
                    self.lost[self.names[member_id]] = str(refusal)
                case Send(member_id, ViewFormed(View() as view) | Running(View() as view) as message):
                    assert message.position == self._position(member_id)
                    members = list(lane(view, message.position))
                    assert {self._position(seat.member_id) for seat in members} <= {message.position}
                    if isinstance(message, ViewFormed):
                        assert members[message.rank].member_id == member_id
                        assert members[message.rank].rank == message.rank
                        assert set(message.newcomers) <= set(range(len(members)))
                case Send(member_id, CatchUp(holders=holders)):
                    assert {self._position(donor.member_id) for donor, _ in holders} <= {self._position(member_id)}
                case Send(member_id, Mismatch(donor)):
                    assert self._position(donor.member_id) == self._position(member_id)
        return effects

    def _position(self, member_id: str) -> int:
        return int(self.names[member_id][1:])

    def _check_view(self, view: View) -> None:
        names = [self.names[seat.member_id] for seat in view.seats]
        assert len(names) % self.size == 0, names
        for first in range(0, len(names), self.size):
            letter = names[first][0]
            assert names[first : first + self.size] == self.replica(letter), names
        assert len({*names}) == len(names) <= self.most * self.size
        newcomers = {view.seats[rank].replica for rank in view.newcomers}
        assert len(newcomers) * self.size == len(view.newcomers), "a replica is new as a whole"
