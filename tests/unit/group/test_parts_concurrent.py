"""Parts of a group side by side, in threads of their own, and their end: they get in nobody's way."""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline._group import Group
from paceline.errors import (
    CollectiveMismatch,
    ConcurrentUse,
    PacelineError,
    PeerLost,
    PeerRaised,
)
from paceline.testing import next_generation
from support.parts import at_once, each, local_mesh, total, world_of

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


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_overlapping_parts_run_collectives_in_separate_threads(first: int) -> None:
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


def test_two_named_parts_of_the_same_members_run_in_two_threads() -> None:
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


def test_two_threads_in_one_group_raise_errors_on_every_rank() -> None:
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


def test_a_mismatch_in_a_part_names_ranks_of_the_view() -> None:
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


def test_closing_a_part_does_not_disturb_other_groups() -> None:
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


def test_a_closed_split_part_stays_closed_in_the_next_generation() -> None:
    with world_of(2) as groups:
        parts = [group.split(color=lambda member: 0) for group in groups]
        for part in parts:
            part.close()
        next_generation(groups)
        for part in parts:
            with pytest.raises(PacelineError, match="closed"):
                part.barrier()
        assert each([group.split(color=lambda member: 0) for group in groups], total) == [[1]] * 2


def test_a_member_that_closes_a_part_is_gone_for_the_others() -> None:
    with world_of(3) as groups:
        parts = [group.subgroup([0, 2]) for group in (groups[0], groups[2])]
        assert each(parts, total) == [[2]] * 2
        parts[0].close()
        with pytest.raises(PeerLost, match=r"rank 0 .local. is gone") as caught:
            parts[1].barrier(5)
        assert caught.value.ranks == (0,)


def test_closing_a_stale_part_keeps_links_of_the_next_generation() -> None:
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


def test_closing_many_parts_leaks_no_links() -> None:
    with world_of(3) as groups:

        def counts() -> Any:
            meshes = [local_mesh(group._core.mesh) for group in groups]
            return [(len(mesh._links), len(mesh.fault._wakers), len(mesh._board._pipes)) for mesh in meshes]

        def left() -> int:
            return len(local_mesh(groups[0]._core.mesh)._board._left)

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
        assert not any(group._core._parts for group in groups)
        assert all(now > then for now, then in zip([group.bytes_sent for group in groups], sent, strict=True))
        assert each(groups, total) == [[3]] * 3
