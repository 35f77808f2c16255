"""The choice among schedules: by bytes and world alone, and printable."""

import pytest

from paceline._collectives.choose import RULES, choose, format_rules, only
from paceline._collectives.rows import SumRule
from paceline._collectives.schedules import SCHEDULES

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "world", "schedule"),
    [
        (KIB, 2, "recursive_doubling"),
        (64 * KIB, 5, "star"),
        (64 * KIB, 8, "star"),
        (64 * KIB, 64, "recursive_doubling"),
        (256 * KIB + 1, 2, "direct"),
        (MIB, 5, "halving_doubling"),
        (MIB + 1, 16, "direct"),
        (MIB, 17, "halving_doubling"),
        (MIB + 1, 17, "ring"),
        (MIB // 999, 1000, "star"),
        (MIB // 999 + 1, 1000, "recursive_doubling"),
    ],
)
def test_schedule_of_all_reduce_depends_on_bytes_and_world(nbytes: int, world: int, schedule: str) -> None:
    choice = choose("all_reduce", nbytes, world)
    assert choice.schedule == schedule
    assert choice.reason


def test_every_collective_has_a_rule_for_every_size_and_world() -> None:
    assert RULES.keys() == SCHEDULES.keys()
    for collective in SCHEDULES:
        for world in (1, 2, 7, 8, 16, 17, 1000):
            for nbytes in (0, 1, KIB, MIB, 1 << 34):
                assert choose(collective, nbytes, world).schedule in SCHEDULES[collective]


def test_sums_in_rank_order_choose_only_in_rank_order_schedules() -> None:
    for collective in ("all_reduce", "reduce", "reduce_scatter"):
        for world in (2, 16, 1000):
            for nbytes in (1, MIB, 1 << 30):
                choice = choose(collective, nbytes, world, sums=SumRule.IN_RANK_ORDER)
                assert SCHEDULES[collective][choice.schedule].sums is SumRule.IN_RANK_ORDER
                forced = (
                    choose(collective, nbytes, world, sums=SumRule.IN_RANK_ORDER, rules=only(collective, "ring"))
                    if collective != "reduce"
                    else choice
                )
                assert SCHEDULES[collective][forced.schedule].sums is SumRule.IN_RANK_ORDER


def test_only_forces_one_schedule_and_refuses_unknown_names() -> None:
    assert choose("all_reduce", 4, 2, rules=only("all_reduce", "ring")).schedule == "ring"
    with pytest.raises(ValueError, match="the schedules are star, direct, ring"):
        only("all_reduce", "spiral")


def test_format_rules_prints_every_collective() -> None:
    text = format_rules()
    for collective, schedules in SCHEDULES.items():
        assert collective in text
        assert any(name in text for name in schedules)
    assert "at most 256 KiB, (W-1) arrays at most 1 MiB" in text
