"""How far members' clocks are ahead of the coordinator's: bounds that hold whatever the network did. Pure.

The coordinator asked before the member read the question, and the answer had come after the member sent it. So the
member's clock is ahead by `read - asked` at most, and by `sent - came` at least. Members of one host have one clock,
for which all their bounds hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sighting:
    """The four times of one question, in seconds.

    `machine` is the same for members with one clock; empty if that is not known. `asked` and `came` are on the
    coordinator's clock, `read` and `sent` on the member's.
    """

    member_id: str
    machine: str
    asked: float
    read: float
    sent: float
    came: float


@dataclass(frozen=True, slots=True)
class Clock:
    """A clock, ahead of the coordinator's, give or take `uncertainty` seconds; None if it was not measured."""

    ahead: float = 0.0
    uncertainty: float | None = None


def align(sightings: Sequence[Sighting]) -> dict[str, Clock]:
    """Returns each member's clock, by member id."""
    own = {each.member_id: (each.sent - each.came, each.read - each.asked) for each in sightings}
    shared: dict[str, tuple[float, float]] = {}
    for each in sightings:
        low, high = own[each.member_id]
        if each.machine:
            least, most = shared.get(each.machine, (low, high))
            shared[each.machine] = max(least, low), min(most, high)
    found = {}
    for each in sightings:
        low, high = shared.get(each.machine, own[each.member_id])
        if low > high:  # a clock was set meanwhile
            low, high = own[each.member_id]
        found[each.member_id] = Clock((low + high) / 2, abs(high - low) / 2)
    return found
