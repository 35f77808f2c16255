"""Parts of a group: who is in them, and which of them last from view to view."""

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any
from unittest import mock

import numpy as np
import pytest

from paceline._base.work import Progress
from paceline._group import Group
from paceline._links.base import Peer
from paceline._links.local import local_meshes, next_meshes
from paceline.errors import (
    CollectiveMismatch,
    InvalidRank,
    InvalidWorldSize,
    LimitExceeded,
    OperationTimeout,
    StaleGeneration,
    UnsupportedOp,
)
from paceline.testing import local_groups, next_generation, run_groups
from pacelinepb.debug.records import group_name
from support.parts import at_once, be_patient, each, local_mesh, on_hosts, total, world_of

# Who is in a part


def test_a_part_maps_its_ranks_to_ranks_of_the_view() -> None:
    with world_of(6) as groups:
        parts = {rank: groups[rank].subgroup([5, 1, 4, 1]) for rank in (1, 4, 5)}
        for place, (rank, part) in enumerate(parts.items()):
            assert (part.rank, part.size, tuple(part.ranks)) == (place, 3, (1, 4, 5))
            assert [part.global_rank(i) for i in range(3)] == [1, 4, 5]
            assert [part.group_rank(i) for i in range(6)] == [None, 0, None, None, 1, 2]
            assert [member.rank for member in part.members] == [1, 4, 5]
            assert part._core.parent is groups[rank]._core
            assert part.generation == groups[rank].generation
            for beyond in (3, -1, True, 1.0):
                with pytest.raises(InvalidRank):
                    part.global_rank(beyond)  # type: ignore[arg-type]
        assert groups[0]._core.parent is None
        assert each(list(parts.values()), total) == [[10]] * 3


def test_parts_of_parts_map_to_ranks_of_the_view() -> None:
    """Ranks are places in the parent; in the end all are ranks of the view."""
    with world_of(7) as groups:
        outer = {rank: groups[rank].subgroup([1, 2, 4, 6]) for rank in (1, 2, 4, 6)}
        inner = {rank: outer[rank].subgroup([1, 3]) for rank in (2, 6)}
        both = {rank: inner[rank].subgroup([0, 1]) for rank in (2, 6)}
        for rank in (2, 6):
            assert tuple(inner[rank].ranks) == tuple(both[rank].ranks) == (2, 6)
            assert both[rank]._core.parent is inner[rank]._core
            assert inner[rank]._core.parent is outer[rank]._core
        root_counts = {
            rank: lambda rank=rank: (total(both[rank]), total(inner[rank]), total(outer[rank])) for rank in (2, 6)
        }
        others = [lambda rank=rank: total(outer[rank]) for rank in (1, 4)]
        found = at_once([root_counts[2], root_counts[6], *others])
        assert found == [([8], [8], [13])] * 2 + [[13]] * 2


def test_roots_and_messages_in_a_part_use_ranks_of_the_part() -> None:
    def rank(group: Group) -> Any:
        if group.rank not in (1, 3, 4):
            return None
        part = group.subgroup([1, 3, 4])
        told = part.broadcast(np.array([group.rank]), root=1).tolist()
        joined = part.gather(np.array([group.rank]), root=2)
        part.send(np.array([10 * group.rank]), (part.rank + 1) % 3, tag=7)
        message, source = part.recv(tag=7)
        mine, own = part.all_to_all(np.arange(3) + 10 * part.rank), part.recv
        part.send(np.array([1]), part.rank)
        assert own(part.rank)[1] == part.rank
        return told, None if joined is None else joined.tolist(), (int(message[0]), source), mine.tolist()

    with world_of(5) as groups:
        found = each(groups, rank)
    assert found[0] is None
    assert found[2] is None
    assert found[1] == ([3], None, (40, 2), [0, 10, 20])
    assert found[3] == ([3], None, (10, 0), [1, 11, 21])
    assert found[4] == ([3], [1, 3, 4], (30, 1), [2, 12, 22])


@pytest.mark.parametrize(("name", "shown"), [("tp", "tp 1"), ("", "1")])
def test_a_member_that_waits_in_a_part_says_its_name_without_a_digest(
    monkeypatch: pytest.MonkeyPatch, name: str, shown: str
) -> None:
    def rank(group: Group) -> str:
        part = group.subgroup([0], name=name)
        lane = part._core.bound.lane
        assert group._core.waits_in_part() == ""
        monkeypatch.setattr(type(lane), "progress", Progress(5, 1.0, True))
        return group._core.waits_in_part()

    assert run_groups(local_groups(1), rank) == [f"operation 5 of group '{shown}'"]


def test_names_of_parts_of_parts_have_no_digests() -> None:
    assert group_name("0123456789abcdef-tp-1/fedcba9876543210--2") == "tp 1/2"
    assert group_name("split1/node") == "split1/node"


def test_messages_of_a_part_and_of_the_view_do_not_mix() -> None:
    def rank(group: Group) -> Any:
        part = group.subgroup([0, 1])
        other = group.subgroup([0, 1], name="other")
        everyone: list[Group] = [group, part, other]
        if group.rank == 0:
            for i, one in enumerate(everyone):
                one.send(np.array([i]), 1, tag=5)
            return None
        return [int(one.recv(0, tag=5)[0][0]) for one in reversed(everyone)]

    assert run_groups(local_groups(2), rank)[1] == [2, 1, 0]


def test_a_message_timeout_in_a_part_names_the_rank_in_the_view() -> None:
    with world_of(4) as groups:
        part = groups[2].subgroup([2, 3])
        with pytest.raises(OperationTimeout, match=r"rank 3 .*rank 2") as received:
            part.recv(1, timeout=0.01)
        assert received.value.ranks == (3,)

        def fill() -> None:
            for _ in range(100_000):
                part.send(np.ones(1), 1, timeout=0.01)

        with pytest.raises(OperationTimeout, match=r"rank 3 .*rank 2") as sent:
            fill()
        assert sent.value.ranks == (3,)


def test_invalid_members_and_names_of_a_part_are_refused() -> None:
    with world_of(3) as groups:
        group = groups[0]
        with pytest.raises(InvalidWorldSize, match="not 0"):
            group.subgroup([])
        with pytest.raises(InvalidRank, match="member 3"):
            group.subgroup([0, 3])
        with pytest.raises(InvalidRank, match="member -1"):
            group.subgroup([-1, 0])
        with pytest.raises(InvalidRank, match=r"rank 0 is not among the members \[1, 2\]"):
            group.subgroup([1, 2])
        for name in ("a b", "a/b", "x" * 41, "ä"):
            with pytest.raises(UnsupportedOp, match="letters, digits"):
                group.subgroup([0], name=name)
        deep = reduce(lambda part, _: part.subgroup([0], name="n" * 40), range(4), group)
        with pytest.raises(LimitExceeded, match="256"):
            deep.subgroup([0], name="n" * 40)
        assert each(groups, total) == [[3]] * 3


def test_a_part_of_one_member_runs_collectives_alone() -> None:
    with world_of(2) as groups:
        alone = groups[1].subgroup([1])
        assert total(alone) == [1]
        assert alone.all_gather(np.ones((2, 2))).tolist() == [[1, 1], [1, 1]]
        alone.barrier()


# Lasting parts


def test_split_forms_parts_by_color_and_orders_ranks_by_key() -> None:
    with world_of(5) as groups:
        parts = [group.split(color=lambda member: member.rank % 2, key=lambda member: -member.rank) for group in groups]
        assert [tuple(part.ranks) for part in parts] == [(4, 2, 0), (3, 1)] * 2 + [(4, 2, 0)]
        assert [part.rank for part in parts] == [2, 1, 1, 0, 0]
        assert each(parts, lambda part: part.all_gather(np.array([part.global_rank(part.rank)])).tolist()) == [
            [4, 2, 0],
            [3, 1],
            [4, 2, 0],
            [3, 1],
            [4, 2, 0],
        ]


def test_equal_keys_keep_the_order_of_ranks() -> None:
    with world_of(4) as groups:
        parts = [group.split(color=lambda member: None, key=lambda member: member.rank // 2 == 0) for group in groups]
        assert [tuple(part.ranks) for part in parts] == [(2, 3, 0, 1)] * 4


def test_split_by_host_forms_a_part_for_each_host() -> None:
    with world_of(5, hosts=["a", "b", "a", "b", "b"]) as groups:
        parts = [group.split_by_host() for group in groups]
        assert [tuple(part.ranks) for part in parts] == [(0, 2), (1, 3, 4), (0, 2), (1, 3, 4), (1, 3, 4)]
        assert each(parts, total) == [[2], [8], [2], [8], [8]]


def test_split_parts_follow_into_the_next_view_and_subgroups_are_stale() -> None:
    def stale_calls(part: Group) -> list[Callable[[], Any]]:
        x = np.ones(2)
        return [
            lambda: part.barrier(0.1),
            lambda: part.all_reduce(x, timeout=0.1),
            lambda: part.all_reduce(x, timeout=0.1, async_op=True),
            lambda: part.broadcast(x, timeout=0.1),
            lambda: part.send(x, 0, timeout=0.1),
            lambda: part.recv(timeout=0.1),
            lambda: part.all_gather_object(1, timeout=0.1),
            lambda: part.average({"a": x}, timeout=0.1),
            lambda: part.subgroup([part.rank]),
            lambda: part.split(color=lambda member: 0),
        ]

    with world_of(4) as groups:
        pairs = [group.split(color=lambda member: member.rank // 2) for group in groups]
        inner = [pair.split(color=lambda member: 0, key=lambda member: -member.rank) for pair in pairs]
        passing = [group.subgroup(range(4)) for group in groups]
        within = [pair.subgroup([0, 1]) for pair in pairs]
        beneath = [part.split(color=lambda member: member.rank % 2) for part in passing]
        for generation in (2, 3, 4):
            next_generation(groups)
            for part in (*passing, *within, *beneath):
                assert part._core.parent is not None
                for call in stale_calls(part):
                    with pytest.raises(StaleGeneration, match="generation 1, which is over") as caught:
                        call()
                    assert caught.value.generation == 1
            assert {part.generation for part in (*groups, *pairs, *inner)} == {generation}
            assert each(pairs, total) == [[1], [1], [5], [5]]
            assert [tuple(part.ranks) for part in inner] == [(1, 0), (1, 0), (3, 2), (3, 2)]
            assert each(inner, total) == [[1], [1], [5], [5]]
            assert each(groups, total) == [[6]] * 4
            again = [group.subgroup(range(4)) for group in groups]
            assert each(again, total) == [[6]] * 4


def test_a_split_of_a_stale_part_does_not_take_links_of_other_parts() -> None:
    """It must not come back as a part of the view, under the name of one that the view has made."""
    with world_of(2) as groups:
        beneath = [group.subgroup([0, 1]).split(color=lambda member: 0) for group in groups]
        own = [group.split(color=lambda member: 0) for group in groups]
        next_generation(groups)
        for part in beneath:
            with pytest.raises(StaleGeneration):
                part.barrier(0.1)
        assert each(own, total) == [[1]] * 2


def test_split_rules_are_applied_again_in_each_view() -> None:
    """Ranks, hosts and the number of members may have changed; the rule says who belongs together now."""
    with world_of(4, hosts=["a", "a", "b", "b"]) as groups:
        hosts = [group.split_by_host() for group in groups]
        pairs = [group.split(color=lambda member: member.rank // 2) for group in groups]
        lists: list[Sequence[Peer]] = []

        def noted(member: Peer) -> int:
            lists.append([member])
            return 0

        all_of_them = [group.split(color=noted) for group in groups]
        assert each(hosts, total) == [[1], [1], [5], [5]]
        meshes = next_meshes([local_mesh(group._core.mesh) for group in groups])
        on_hosts(meshes, ["a", "b", "a", "b"])
        lists.clear()
        for group, mesh in zip(groups, meshes, strict=True):
            group._core.move(mesh)
        assert lists, "the rule is asked again"
        assert [tuple(part.ranks) for part in hosts] == [(0, 2), (1, 3), (0, 2), (1, 3)]
        assert each(hosts, total) == [[2], [4], [2], [4]]
        assert each(all_of_them, total) == [[6]] * 4
        # Rank 3 is gone; the others are in another order.
        smaller = local_meshes(3, generation=3)
        left, gone = groups[:3], groups[3]
        for group, mesh in zip(reversed(left), smaller, strict=True):
            group._core.move(mesh)
        assert [group.rank for group in left] == [2, 1, 0]
        assert [tuple(part.ranks) for part in pairs[:3]] == [(2,), (0, 1), (0, 1)]
        assert each(pairs[:3], total) == [[2], [1], [1]]
        assert each(hosts[:3], total) == [[3]] * 3
        gone.close()


def test_split_rules_that_differ_between_ranks_are_a_mismatch() -> None:
    with world_of(3) as groups:
        parts = [group.split(color=lambda member, mine=group.rank: 0 if mine else member.rank == 2) for group in groups]
        assert [tuple(part.ranks) for part in parts] == [(0, 1), (0, 1, 2), (0, 1, 2)]
        found = each(parts, lambda part: part.all_reduce(np.ones(1), timeout=10))
        assert {type(error) for error in found} == {CollectiveMismatch}
        assert len({str(error) for error in found}) == 1


def test_parts_continue_in_the_next_generation_after_a_failure_in_one() -> None:
    with world_of(4) as groups:
        pairs = [group.split(color=lambda member: member.rank // 2) for group in groups]
        error = each(pairs[:1], lambda part: part.all_reduce(np.ones(3), timeout=0.05))[0]
        assert isinstance(error, OperationTimeout)
        for group in (*groups, *pairs):
            with pytest.raises(OperationTimeout) as caught:
                group.barrier()
            assert str(caught.value) == str(error)
        next_generation(groups)
        assert each(pairs, total) == [[1], [1], [5], [5]]
        assert each(groups, total) == [[6]] * 4


def test_calls_of_an_earlier_generation_do_not_cause_a_mismatch() -> None:
    """A member that has waited for long compares what others sent with its own calls: those of this generation."""
    with world_of(3) as groups:
        each(groups, lambda group: [group.barrier() for _ in range(5)])
        next_generation(groups)
        for group in groups:
            be_patient(group, 0.02)
        looked = threading.Event()

        def rank(group: Group) -> Any:
            if group.rank == 2:
                assert looked.wait(10)
            gathered = group.gather(np.array([1.0]), root=1)  # rank 0 is done with it, and goes on
            return None if gathered is None else gathered.tolist(), group.all_gather(np.array([2.0])).tolist()

        exchange = groups[1]._core.bound.engine._exchange
        look = exchange._look_around

        def poll(awaited: int | None = None) -> None:
            look(awaited)
            if awaited == 2 and 0 in exchange._early:
                looked.set()

        with mock.patch.object(exchange, "_look_around", poll):
            found = at_once([lambda group=group: rank(group) for group in groups])
        assert found == [(None, [2.0] * 3), ([1.0] * 3, [2.0] * 3), (None, [2.0] * 3)]
