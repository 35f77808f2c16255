"""Parts of a group: who is in them, how long they live, and that they get in nobody's way."""

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from time import monotonic
from typing import Any
from unittest import mock

import numpy as np
import pytest

from paceline.config import Config
from paceline.errors import (
    CollectiveMismatch,
    ConcurrentUse,
    InvalidRank,
    InvalidWorldSize,
    LimitExceeded,
    OperationTimeout,
    PacelineError,
    PeerLost,
    PeerRaised,
    StaleGeneration,
    UnsupportedOp,
)
from paceline.group import Group
from paceline.links.base import Mesh, Peer
from paceline.links.local import LocalMesh, local_meshes, next_meshes
from paceline.testing import local_groups, next_generation, run_groups

SOON = Config(failure_timeout=0.6)


def at_once(doings: Sequence[Callable[[], Any]], seconds: float = 15.0) -> list[Any]:
    """Does all of them at the same time; what each returns, or the error that it raises."""
    outcomes: list[Any] = [None] * len(doings)

    def run(i: int) -> None:
        try:
            outcomes[i] = doings[i]()
        except BaseException as error:  # noqa: BLE001  the test looks at it
            outcomes[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(doings))]
    deadline = monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - monotonic()))
    assert not any(thread.is_alive() for thread in threads), "some hang"
    return outcomes


def each(groups: Sequence[Group], do: Callable[[Group], Any]) -> list[Any]:
    """What every rank does at the same time."""
    return at_once([lambda group=group: do(group) for group in groups])


def total(group: Group) -> Any:
    """The sum of the members' ranks in the view."""
    return group.all_reduce(np.array([group.global_rank(group.rank)])).tolist()


@contextmanager
def world_of(world: int, hosts: Sequence[str] | None = None) -> Iterator[list[Group]]:
    meshes = local_meshes(world)
    if hosts is not None:
        on_hosts(meshes, hosts)
    groups = [Group(mesh, SOON) for mesh in meshes]
    yield groups
    for group in groups:
        group.close(0.2)


def on_hosts(meshes: Sequence[LocalMesh], hosts: Sequence[str]) -> None:
    for mesh in meshes:
        mesh.peers = [replace(peer, host=host) for peer, host in zip(mesh.peers, hosts, strict=True)]


# Who is in a part


def test_ranks_of_a_part_and_of_the_view() -> None:
    with world_of(6) as groups:
        parts = {rank: groups[rank].subgroup([5, 1, 4, 1]) for rank in (1, 4, 5)}
        for place, (rank, part) in enumerate(parts.items()):
            assert (part.rank, part.size, tuple(part.ranks)) == (place, 3, (1, 4, 5))
            assert [part.global_rank(i) for i in range(3)] == [1, 4, 5]
            assert [part.group_rank(i) for i in range(6)] == [None, 0, None, None, 1, 2]
            assert [member.rank for member in part.members] == [1, 4, 5]
            assert part.parent is groups[rank]
            assert part.generation == groups[rank].generation
            for beyond in (3, -1, True, 1.0):
                with pytest.raises(InvalidRank):
                    part.global_rank(beyond)  # type: ignore[arg-type]
        assert groups[0].parent is None
        assert each(list(parts.values()), total) == [[10]] * 3


def test_parts_of_parts() -> None:
    """Ranks are places in the parent; in the end all are ranks of the view."""
    with world_of(7) as groups:
        outer = {rank: groups[rank].subgroup([1, 2, 4, 6]) for rank in (1, 2, 4, 6)}
        inner = {rank: outer[rank].subgroup([1, 3]) for rank in (2, 6)}
        both = {rank: inner[rank].subgroup([0, 1]) for rank in (2, 6)}
        for rank in (2, 6):
            assert tuple(inner[rank].ranks) == tuple(both[rank].ranks) == (2, 6)
            assert both[rank].parent is inner[rank]
            assert inner[rank].parent is outer[rank]
        root_counts = {
            rank: lambda rank=rank: (total(both[rank]), total(inner[rank]), total(outer[rank])) for rank in (2, 6)
        }
        others = [lambda rank=rank: total(outer[rank]) for rank in (1, 4)]
        found = at_once([root_counts[2], root_counts[6], *others])
        assert found == [([8], [8], [13])] * 2 + [[13]] * 2


def test_roots_and_messages_go_by_places() -> None:
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


def test_a_late_message_is_blamed_on_the_rank_in_the_view() -> None:
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


def test_mistakes() -> None:
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


def test_a_part_of_one() -> None:
    with world_of(2) as groups:
        alone = groups[1].subgroup([1])
        assert total(alone) == [1]
        assert alone.all_gather(np.ones((2, 2))).tolist() == [[1, 1], [1, 1]]
        alone.barrier()


# Lasting parts


def test_split_by_color_and_key() -> None:
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


def test_split_by_host() -> None:
    with world_of(5, hosts=["a", "b", "a", "b", "b"]) as groups:
        parts = [group.split_by_host() for group in groups]
        assert [tuple(part.ranks) for part in parts] == [(0, 2), (1, 3, 4), (0, 2), (1, 3, 4), (1, 3, 4)]
        assert each(parts, total) == [[2], [8], [2], [8], [8]]


def test_lasting_parts_follow_and_others_are_stale() -> None:
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
                assert part.parent is not None
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


def test_a_lasting_part_of_a_stale_part_takes_nobody_elses_links() -> None:
    """It must not come back as a part of the view, under the name of one that the view has made."""
    with world_of(2) as groups:
        beneath = [group.subgroup([0, 1]).split(color=lambda member: 0) for group in groups]
        own = [group.split(color=lambda member: 0) for group in groups]
        next_generation(groups)
        for part in beneath:
            with pytest.raises(StaleGeneration):
                part.barrier(0.1)
        assert each(own, total) == [[1]] * 2


def test_rules_are_applied_again_in_each_view() -> None:
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
        meshes = next_meshes([local_mesh(group.mesh) for group in groups])
        on_hosts(meshes, ["a", "b", "a", "b"])
        lists.clear()
        for group, mesh in zip(groups, meshes, strict=True):
            group.move(mesh)
        assert lists, "the rule is asked again"
        assert [tuple(part.ranks) for part in hosts] == [(0, 2), (1, 3), (0, 2), (1, 3)]
        assert each(hosts, total) == [[2], [4], [2], [4]]
        assert each(all_of_them, total) == [[6]] * 4
        # Rank 3 is gone; the others are in another order.
        smaller = local_meshes(3, generation=3)
        left, gone = groups[:3], groups[3]
        for group, mesh in zip(reversed(left), smaller, strict=True):
            group.move(mesh)
        assert [group.rank for group in left] == [2, 1, 0]
        assert [tuple(part.ranks) for part in pairs[:3]] == [(2,), (0, 1), (0, 1)]
        assert each(pairs[:3], total) == [[2], [1], [1]]
        assert each(hosts[:3], total) == [[3]] * 3
        gone.close()


def local_mesh(mesh: Mesh) -> LocalMesh:
    assert isinstance(mesh, LocalMesh)
    return mesh


def test_rules_that_differ_are_a_mismatch() -> None:
    with world_of(3) as groups:
        parts = [group.split(color=lambda member, mine=group.rank: 0 if mine else member.rank == 2) for group in groups]
        assert [tuple(part.ranks) for part in parts] == [(0, 1), (0, 1, 2), (0, 1, 2)]
        found = each(parts, lambda part: part.all_reduce(np.ones(1), timeout=1))
        assert {type(error) for error in found} == {CollectiveMismatch}
        assert len({str(error) for error in found}) == 1


def test_parts_go_on_after_a_failure_in_one_of_them() -> None:
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


def test_what_was_called_in_an_earlier_generation_proves_nothing_in_this_one() -> None:
    """A member that has waited for long compares what others sent with its own calls: those of this generation."""
    with world_of(3) as groups, mock.patch("paceline.collectives.exchange.PATIENCE", 0.02):
        each(groups, lambda group: [group.barrier() for _ in range(5)])
        next_generation(groups)
        looked = threading.Event()

        def rank(group: Group) -> Any:
            if group.rank == 2:
                assert looked.wait(10)
            gathered = group.gather(np.array([1.0]), root=1)  # rank 0 is done with it, and goes on
            return None if gathered is None else gathered.tolist(), group.all_gather(np.array([2.0])).tolist()

        exchange = groups[1]._bound.engine._exchange
        look = exchange._look_around

        def look_around(awaited: int | None = None) -> None:
            look(awaited)
            if awaited == 2 and 0 in exchange._early:
                looked.set()

        with mock.patch.object(exchange, "_look_around", look_around):
            found = at_once([lambda group=group: rank(group) for group in groups])
        assert found == [(None, [2.0] * 3), ([1.0] * 3, [2.0] * 3), (None, [2.0] * 3)]


# Side by side


@contextmanager
def eager_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def busy(group: Group, seed: int, rounds: int = 8) -> None:
    """A random sequence of collectives, the same on all members, whose results must be right."""
    ranks, world, me = np.array(group.ranks), group.size, group.global_rank(group.rank)
    rng = random.Random(seed)
    works = []
    for i in range(rounds):
        n = rng.choice([1, 7, 500, 5000])
        root = rng.randrange(world)
        x = np.full(n, me + i)
        kind = rng.randrange(6)
        later = rng.random() < 0.4
        if kind == 0:
            works.append((group.all_reduce(x, async_op=later), (ranks + i).sum()))
        elif kind == 1:
            works.append((group.broadcast(x, root=root, async_op=later), ranks[root] + i))
        elif kind == 2:
            works.append((group.all_gather(x, async_op=later), np.repeat(ranks + i, n)))
        elif kind == 3:
            works.append((group.all_to_all(np.repeat(x, world), async_op=later), np.repeat(ranks + i, n)))
        elif kind == 4:
            group.send(x, (group.rank + 1) % world, tag=i)
            got, source = group.recv((group.rank - 1) % world, tag=i)
            assert source == (group.rank - 1) % world
            works.append((got, ranks[source] + i))
        else:
            group.barrier()
    for got, hoped in works:
        assert (np.asarray(got if isinstance(got, np.ndarray) else got.wait(20)) == hoped).all()


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_overlapping_groups_in_threads_of_their_own(first: int) -> None:
    """Each rank has a thread for each of its groups, in which other ranks come in another order."""
    teams = {"a": [0, 1, 2], "b": [1, 2, 3], "c": [0, 1, 2, 3]}
    for seed in range(first, first + 10):
        with world_of(4) as groups, eager_threads():
            rng = random.Random(seed)
            jobs = []
            for name, members in teams.items():
                for member in members:
                    part = groups[member].subgroup(members, name=name)
                    jobs.append(partial(busy, part, 1000 * seed + ord(name)))
            rng.shuffle(jobs)
            assert at_once(jobs, seconds=30) == [None] * len(jobs), f"seed {seed}"


def test_the_same_members_twice_in_two_threads() -> None:
    """By name, so that the order in which threads make them does not matter."""
    with world_of(3) as groups, eager_threads():

        def make_and_use(group: Group, name: str) -> None:
            busy(group.subgroup(range(3), name=name), seed=len(name), rounds=12)

        jobs = [lambda group=group, name=name: make_and_use(group, name) for group in groups for name in ("x", "yy")]
        jobs[2:4] = reversed(jobs[2:4])
        assert at_once(jobs) == [None] * 6


def test_unnamed_parts_of_the_same_members_are_told_apart_by_their_order() -> None:
    with world_of(2) as groups:
        first, second = ([group.subgroup([0, 1]) for group in groups] for _ in range(2))
        works = [part.all_reduce(np.array([1]), async_op=True) for part in (first[0], second[0])]
        assert second[1].all_reduce(np.array([20])).tolist() == [21]
        assert first[1].all_reduce(np.array([10])).tolist() == [11]
        assert [work.wait(5).tolist() for work in works] == [[11], [21]]


def test_two_threads_in_one_group_are_found_out_everywhere() -> None:
    with world_of(3) as groups:
        works = [group.all_reduce(np.ones(4), async_op=True) for group in groups[:2]]  # rank 2 does not come
        (found,) = each([groups[1]], lambda group: group.all_reduce(np.ones(4)))
        assert type(found) is ConcurrentUse
        assert "thread" in str(found)
        assert "subgroup" in str(found)
        news = each(groups, lambda group: works[group.rank].wait(5) if group.rank < 2 else group.barrier(5))
        news += each(groups, lambda group: group.barrier(5))
        assert {type(error) for error in news} == {PeerRaised}
        assert {error.ranks for error in news} == {(1,)}
        assert len({str(error) for error in news}) == 1
        assert "rank 1 (local) raised ConcurrentUse" in str(news[0])


@pytest.mark.parametrize("seed", range(10))
def test_two_threads_in_one_group_at_every_rank_never_hang(seed: int) -> None:
    """Either they took turns by chance, or all ranks get typed errors, the same one but at those that are to blame."""
    with world_of(3) as groups, eager_threads():
        gate = threading.Barrier(6)

        def use(group: Group) -> None:
            gate.wait(10)
            for _ in range(20):
                group.all_reduce(np.ones(3), timeout=10)

        found = at_once([lambda group=group: use(group) for group in groups for _ in range(2)])
        assert all(error is None or type(error) in (ConcurrentUse, PeerRaised) for error in found), found
        if any(found):
            guilty = {i // 2 for i, error in enumerate(found) if type(error) is ConcurrentUse}
            assert guilty
            news = {(str(error), error.ranks) for error in found if type(error) is PeerRaised}
            assert len(news) == 1
            ((text, ranks),) = news
            assert set(ranks) <= guilty
            assert f"rank {ranks[0]} (local) raised ConcurrentUse" in text


def test_a_disagreement_in_a_part_names_ranks_of_the_view() -> None:
    with world_of(5) as groups:
        parts = {rank: groups[rank].subgroup([1, 3, 4]) for rank in (1, 3, 4)}

        def rank(group: Group) -> None:
            part = parts.get(group.rank)
            if part is not None:
                part.all_reduce(np.ones(2 if group.rank == 3 else 1), timeout=5)
            group.barrier()

        found = each(groups, rank)
        assert {type(error) for error in found} == {CollectiveMismatch}
        assert len({(str(error), error.ranks) for error in found}) == 1
        error = found[0]
        assert error.ranks in ((1, 3), (3, 4))
        assert "rank 3 (local)" in str(error)
        assert "float64[2]" in str(error)
        assert "float64[1]" in str(error)


# The end of a part


def test_a_closed_part_disturbs_nobody() -> None:
    with world_of(3) as groups:
        names = ("keep", "drop")
        keep, drop = ([group.subgroup(range(3), name=name) for group in groups] for name in names)
        inner = [part.subgroup(range(3)) for part in drop]
        lasting = [group.split(color=lambda member: 0) for group in groups]
        for parts in (keep, drop, inner, lasting, groups):
            assert each(parts, total) == [[3]] * 3
            each(parts, lambda part: part.send(np.ones(1), (part.rank + 1) % 3))
        works = [part.all_reduce(np.ones(2), async_op=True) for part in (keep[0], lasting[0], groups[0])]
        for part in drop:
            part.close()
            part.close()
        for part in (*drop, *inner):
            with pytest.raises(PacelineError, match="closed"):
                part.barrier()
        for parts, work in zip((keep, lasting, groups), works, strict=True):
            each(parts[1:], lambda part: part.all_reduce(np.ones(2)))
            assert work.wait(5).tolist() == [3, 3]
            parts[0].hand_over()  # from the test's thread, which lives on
            assert each(parts, lambda part: part.recv((part.rank - 1) % 3)[1]) == [2, 0, 1]
            assert each(parts, total) == [[3]] * 3
        next_generation(groups)
        assert each(lasting, total) == [[3]] * 3


def test_a_closed_lasting_part_stays_closed() -> None:
    with world_of(2) as groups:
        parts = [group.split(color=lambda member: 0) for group in groups]
        for part in parts:
            part.close()
        next_generation(groups)
        for part in parts:
            with pytest.raises(PacelineError, match="closed"):
                part.barrier()
        assert each([group.split(color=lambda member: 0) for group in groups], total) == [[1]] * 2


def test_a_part_that_one_member_closes_is_left_as_seen_by_the_others() -> None:
    with world_of(3) as groups:
        parts = [group.subgroup([0, 2]) for group in (groups[0], groups[2])]
        assert each(parts, total) == [[2]] * 2
        parts[0].close()
        with pytest.raises(PeerLost, match=r"rank 0 .local. left") as caught:
            parts[1].barrier(5)
        assert caught.value.ranks == (0,)


def test_a_stale_part_that_is_closed_takes_no_links_of_the_next_generation_with_it() -> None:
    """Parts of the same members, made in the same order, have the same names in each generation."""
    with world_of(2) as groups:
        old = [group.subgroup([0, 1]) for group in groups]
        assert each(old, total) == [[1]] * 2
        next_generation(groups)
        new = [group.subgroup([0, 1]) for group in groups]
        assert each(new, total) == [[1]] * 2
        old[0].close()
        assert each(new, total) == [[1]] * 2
        old[1].close()
        assert each(new, total) == [[1]] * 2


def test_a_part_closed_in_one_generation_can_be_made_again_in_the_next() -> None:
    with world_of(2) as groups:
        for _ in range(3):
            parts = [group.subgroup([0, 1]) for group in groups]
            assert each(parts, total) == [[1]] * 2
            parts[0].close()  # the other member does not come to that before the generation is over
            next_generation(groups)


def test_closing_in_turn_or_in_step_leaves_no_links_behind() -> None:
    with world_of(3) as groups:

        def counts() -> Any:
            meshes = [local_mesh(group.mesh) for group in groups]
            return [(len(mesh._links), len(mesh.fault._wakers), len(mesh._board._pipes)) for mesh in meshes]

        def left() -> int:
            return len(local_mesh(groups[0].mesh)._board._left)

        each(groups, total)
        each(groups, lambda group: group.barrier())
        before, sent = counts(), [group.bytes_sent for group in groups]

        def use(group: Group) -> None:
            for i in range(200):
                members = [[0, 1, 2], [0, 1], [1, 2]][i % 3]
                if group.rank not in members:
                    continue
                part = group.subgroup(members, name="n" if i % 2 else "")
                part.all_reduce(np.ones(3))
                if i % 5 == 0:
                    part.all_reduce(np.ones(3), async_op=True).wait(5)
                    part.send(np.ones(1), (part.rank + 1) % part.size)
                    part.recv()
                part.barrier()
                part.close()

        assert each(groups, use) == [None] * 3
        assert counts() == before
        assert left() == 0
        assert not any(group._parts for group in groups)
        assert all(now > then for now, then in zip([group.bytes_sent for group in groups], sent, strict=True))
        assert each(groups, total) == [[3]] * 3
