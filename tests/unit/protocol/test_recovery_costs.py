"""What the coordinator does and sends when a job of many members loses one: counted, so that no load can change it."""

from __future__ import annotations

import pytest
from unit.protocol.recovery import recover


@pytest.mark.parametrize("laggards", [False, True])
def test_recovery_of_a_thousand_members_sends_few_orders_and_bytes(laggards: bool) -> None:
    costs = recover(1_000, laggards=laggards)
    assert costs.orders == (500 if laggards else 0), "each laggard is told once"
    assert costs.donors <= 16 * costs.orders
    assert costs.most_orders <= 20, "the load is spread over all donors: 16 each"
    assert costs.effects < 7 * 1_000
    assert costs.sent < 5e6 * (1.0 if laggards else 0.1)


@pytest.mark.parametrize("laggards", [False, True])
def test_recovery_work_per_member_does_not_grow_with_the_world_size(laggards: bool) -> None:
    few, many = (recover(world, laggards=laggards, count_calls=True) for world in (100, 800))
    assert many.calls / 800 < 1.2 * few.calls / 100
    assert many.sent / 800 < 1.2 * few.sent / 100


def test_recovery_of_five_thousand_members_takes_under_3_s_of_cpu() -> None:
    """Of its own processor time, of which it takes a tenth: what grows faster than the members shows, in C too."""
    costs = recover(5_000, laggards=True)
    assert costs.cpu < 3.0
    assert costs.donors <= 16 * costs.orders
