"""A recovery of many members, driven through `Membership.handle` alone: what it costs the coordinator, in numbers.

One member of a line dies. The others report it and stop; some of them lag a step behind, take the base from the rest
and say so. Then the next generation forms. Everything is counted that a machine's load cannot change.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from paceline_protocol import OURS, JobSettings, Meet, Process, Report, Seat, Tag, View
from paceline_protocol.coordinator import (
    Effect,
    Event,
    ExitReported,
    JobState,
    Membership,
    MetOthers,
    Reported,
    Send,
    Session,
    Standing,
    StoreView,
    Ticked,
    ViewStored,
)
from paceline_protocol.messages import CatchUp, ViewFormed
from paceline_protocol.translation import write_message
from paceline_server.pages import ViewPages
from paceline_server.settings import ServerSettings
from pacelinepb.v1.errors_pb2 import ErrorReason

__all__ = ["Costs", "recover"]

_GENERATION = 7
_BEHIND, _AHEAD = Tag(_GENERATION, 41), Tag(_GENERATION, 42)
_MANIFEST = bytes(32)
_SPREAD = 1.0
"""Seconds over which members stop, and then those that lag take the base."""


@dataclass(slots=True)
class Costs:
    """What a recovery cost.

    Attributes:
        events: handed to the membership.
        effects: that came back.
        orders: to take the base.
        donors: named in those orders.
        most_orders: those that named the same member.
        calls: of Python functions, if they were counted.
        sent: bytes of all messages to members, the member list of the new view among them.
        cpu: seconds in `Membership.handle`; it takes longer while calls are counted.
    """

    events: int = 0
    effects: int = 0
    orders: int = 0
    donors: int = 0
    most_orders: int = 0
    calls: int = 0
    sent: int = 0
    cpu: float = 0.0


def recover(world: int, *, laggards: bool, count_calls: bool = False) -> Costs:
    """A line of `world` members loses one and goes on without it.

    Args:
        world: members before.
        laggards: half of the others are a step behind.
        count_calls: have the interpreter count calls of Python functions.
    """
    return _Recovery(world, count_calls).run(laggards)


class _Recovery:
    def __init__(self, world: int, count_calls: bool) -> None:
        self._count_calls = count_calls
        self._now = 100.0
        self._state = _line(self._now, world)
        self._membership = Membership(self._state, ServerSettings())
        self._costs = Costs()
        self._ordered: list[tuple[str, CatchUp]] = []
        self._view: View | None = None

    def run(self, laggards: bool) -> Costs:
        """All of it."""
        old = self._state.view
        assert old is not None
        seats = list(old.seats)
        dead = seats.pop(len(seats) // 2)
        self._do(ExitReported(dead.process, -9))
        order = random.Random(1)
        order.shuffle(seats)
        behind = {seat.member_id for seat in seats[::2]} if laggards else set()
        for seat in seats:
            self._wait(_SPREAD / len(seats))
            lost = Report(-1, ErrorReason.ERROR_REASON_PEER_LOST, dead.rank, 9, "the link ended")
            self._do(Reported(seat.member_id, _GENERATION, lost))  # after the verdict, as most do
            held = _BEHIND if seat.member_id in behind else _AHEAD
            self._do(MetOthers(seat.member_id, Meet(_GENERATION, held, True, manifest=_MANIFEST)))
        named: dict[str, int] = {}
        while self._ordered:
            ordered, self._ordered = self._ordered, []
            order.shuffle(ordered)
            for member_id, catch_up in ordered:
                for donor, _ in catch_up.holders:
                    named[donor.member_id] = named.get(donor.member_id, 0) + 1
                self._wait(_SPREAD / len(ordered))
                self._do(MetOthers(member_id, Meet(_GENERATION, catch_up.base, True, manifest=_MANIFEST)))
        assert self._view is not None, self._membership.decision.reason
        assert len(self._view.seats) == len(seats)
        self._costs.most_orders = max(named.values(), default=0)
        self._costs.sent += _member_lists(old, self._view)
        return self._costs

    def _wait(self, seconds: float) -> None:
        self._now += seconds
        if self._membership.next_deadline() <= self._now:
            self._do(Ticked())

    def _do(self, event: Event) -> None:
        self._costs.events += 1
        if self._count_calls:
            sys.setprofile(self._called)
        began = time.process_time()
        effects = self._membership.handle(self._now, event)
        self._costs.cpu += time.process_time() - began
        sys.setprofile(None)
        self._costs.effects += len(effects)
        for effect in effects:
            self._perform(effect)

    def _called(self, frame: object, event: str, argument: object) -> None:
        self._costs.calls += event == "call"

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StoreView(view):
                self._do(ViewStored(view.generation))
            case Send(_, ViewFormed(View() as view) as message):
                self._view = view
                self._costs.sent += write_message(replace(message, members=_pages(view).announced)).ByteSize()
            case Send(member_id, message):
                self._costs.sent += write_message(message).ByteSize()
                if isinstance(message, CatchUp):
                    self._costs.orders += 1
                    self._costs.donors += len(message.holders)
                    self._ordered.append((member_id, message))


_PAGES: dict[str, Any] = {}


def _pages(view: View) -> ViewPages:
    if _PAGES.get("view") is not view:
        _PAGES.update(view=view, pages=ViewPages.of(view, 0, ServerSettings().page_members))
    pages: ViewPages = _PAGES["pages"]
    return pages


def _member_lists(old: View, new: View) -> int:
    """What all members of the new view fetch: the list of its members."""
    size = ServerSettings().page_members
    known = ViewPages.of(old, 0, size)
    pages = ViewPages.of(new, 0, size, known)
    first = pages.page(0, known.sha256)
    assert first is not None
    rest = 0 if first is pages.changes else sum(map(len, pages.pages[1:]))
    return len(new.seats) * (len(first) + rest)


def _line(now: float, world: int) -> JobState:
    """A line that runs, eight members to a host."""
    settings = JobSettings(1, world, 30.0)
    boot = "0b5d7a0e-7a51-4a33-8f7e-%012d"
    seats = tuple(
        Seat(
            rank,
            f"{rank:020x}",
            Process(f"node-{rank // 8:04}", 4000 + rank, boot % (rank // 8), 1, 1, "n"),
            f"10.0.{rank // 8 // 256}.{rank // 8 % 256}:{40000 + rank % 8}",
            b"token",
            rank,
        )
        for rank in range(world)
    )
    view = View(_GENERATION, settings, False, seats, OURS, base=Tag(_GENERATION - 1, 40), manifest=_MANIFEST)
    sessions = {
        seat.member_id: Session(
            seat.member_id,
            seat.token_sha256,
            seat.process,
            seat.address,
            settings,
            None,
            0,
            seat.arrival,
            stream=seat.rank + 1,
            heard=now,
            lease_from=now,
            versions=OURS,
            standing=Standing.IN_VIEW,
            generation=_GENERATION,
            last_generation=_GENERATION,
            rank=seat.rank,
        )
        for seat in seats
    }
    state = JobState("job", generation=_GENERATION, view=view)
    for member_id, session in sessions.items():
        state.sessions[member_id] = session
    return state
