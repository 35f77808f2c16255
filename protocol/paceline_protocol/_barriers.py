"""Named barriers of one generation.

A barrier is (name, round). It passes when every member of the view is there. It fails for all when the generation is
void or a member has left for good, and for one when its time is up: its arrival is withdrawn, the others wait on.
Whether a member may enter at all (is it in this generation?) is decided before, by the membership.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from paceline_protocol._events import BarrierEntered, Effect, Send
from paceline_protocol._values import Seat, Verdict, View
from paceline_protocol.messages import BarrierFailed, BarrierPassed
from pacelinepb.v1.errors_pb2 import ErrorReason

Whereabouts = Callable[[int], str]
"""Says of a rank when it was last seen: "last heard 0.3 s ago", "disconnected 12.1 s ago"."""

_NAMED = 10
"""So many missing members are described in words; the answer's `culprits` has all."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    seat: Seat
    call: int
    deadline: float
    timeout: float


@dataclass(slots=True)
class _Barrier:
    arrivals: dict[int, _Arrival] = field(default_factory=dict)
    earliest: float = float("inf")
    """Never above the earliest deadline of the arrivals."""


class Barriers:
    """The barriers of the latest view: at most `limit` are open at one time, and as many passed names remembered."""

    def __init__(self, view: View | None, limit: int) -> None:
        self._limit = limit
        self.begin(view)

    def begin(self, view: View | None) -> None:
        """Forgets all barriers, because a new view has formed or the old one is over."""
        self._view = view
        self._open: dict[tuple[str, int], _Barrier] = {}
        # A member whose stream broke asks again and must learn that the barrier was passed meanwhile.
        self._passed: OrderedDict[str, int] = OrderedDict()

    def enter(self, now: float, seat: Seat, event: BarrierEntered, left: Iterable[Seat]) -> list[Effect]:
        """A member arrives; a repeat replaces its arrival. If one has `left`, the barrier can never be full."""
        assert self._view is not None, "a barrier is of a view"
        if event.round <= self._passed.get(event.name, -1):
            return [Send(seat.member_id, BarrierPassed(event.call))]
        for gone in left:
            return [self._needs_leaver(_Arrival(seat, event.call, now, event.timeout), event.name, gone)]
        key = (event.name, event.round)
        barrier = self._open.get(key)
        if barrier is None:
            if len(self._open) >= self._limit:
                text = f"{self._limit} barriers of this job are open already"
                return [Send(seat.member_id, BarrierFailed(event.call, ErrorReason.ERROR_REASON_LIMIT, text))]
            barrier = self._open[key] = _Barrier()
        deadline = now + event.timeout
        barrier.arrivals[seat.rank] = _Arrival(seat, event.call, deadline, event.timeout)
        barrier.earliest = min(barrier.earliest, deadline)
        if len(barrier.arrivals) < len(self._view.seats):
            return []
        del self._open[key]
        self._passed[event.name] = event.round
        self._passed.move_to_end(event.name)
        if len(self._passed) > self._limit:
            self._passed.popitem(last=False)
        return [Send(a.seat.member_id, BarrierPassed(a.call)) for a in barrier.arrivals.values()]

    def withdraw(self, member: Seat) -> list[Effect]:
        """A member has left in good order: no open barrier can be full any more."""
        effects: list[Effect] = []
        for (name, _), barrier in self._open.items():
            barrier.arrivals.pop(member.rank, None)
            effects += [self._needs_leaver(arrival, name, member) for arrival in barrier.arrivals.values()]
        self._open.clear()
        return effects

    def expire(self, now: float, whereabouts: Whereabouts) -> list[Effect]:
        """Withdraws the arrivals whose time is up, and tells each which members are missing."""
        effects: list[Effect] = []
        for (name, round_), barrier in list(self._open.items()):
            assert self._view is not None, "a barrier is of a view"
            if barrier.earliest > now:
                continue
            due = [a for a in barrier.arrivals.values() if a.deadline <= now]
            missing = [seat for seat in self._view.seats if seat.rank not in barrier.arrivals]
            culprits = tuple(dict.fromkeys(seat.number for seat in missing))
            arrived = f"{len(barrier.arrivals)} of {len(self._view.seats)} members arrived"
            listed = "; ".join(f"{seat.short_label}: {whereabouts(seat.rank)}" for seat in missing[:_NAMED])
            more = f"; and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            for arrival in due:
                text = (
                    f"barrier {name!r} (round {round_}) timed out after {arrival.timeout:g} s: {arrived}; "
                    f"missing {listed}{more}"
                )
                reason = ErrorReason.ERROR_REASON_TIMEOUT
                effects.append(Send(arrival.seat.member_id, BarrierFailed(arrival.call, reason, text, culprits)))
                del barrier.arrivals[arrival.seat.rank]
            barrier.earliest = min((a.deadline for a in barrier.arrivals.values()), default=float("inf"))
            if not barrier.arrivals:
                del self._open[name, round_]
        return effects

    def fail_all(self, verdict: Verdict) -> list[Effect]:
        """The generation is void."""
        effects: list[Effect] = [
            Send(a.seat.member_id, BarrierFailed(a.call, verdict.reason, verdict.text, verdict.culprits))
            for barrier in self._open.values()
            for a in barrier.arrivals.values()
        ]
        self._open.clear()
        return effects

    def next_deadline(self) -> float:
        """When `expire` is due, infinity for never."""
        return min((barrier.earliest for barrier in self._open.values()), default=float("inf"))

    @staticmethod
    def _needs_leaver(arrival: _Arrival, name: str, gone: Seat) -> Send:
        text = f"barrier {name!r} cannot be passed: {gone.label} left the job"
        reason = ErrorReason.ERROR_REASON_PEER_LOST
        return Send(arrival.seat.member_id, BarrierFailed(arrival.call, reason, text, (gone.number,)))
