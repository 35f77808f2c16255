"""A user's mistake is a typed error at the call that says what is wrong, and costs nothing: the group goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline._group import Group
from paceline.errors import InvalidRank, InvalidWorldSize, PacelineError
from paceline.testing import local_groups, run_ranks

X = np.ones(4, np.float32)

MISTAKES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a member that is half a rank": ("", lambda g: g.subgroup([g.rank, 0.5])),
    "a member in words": ("", lambda g: g.subgroup([g.rank, "1"])),
    "a member that is none": ("", lambda g: g.subgroup([g.rank, None])),
    "half a tag": ("tag", lambda g: g.send(X, 0, tag=1.5)),
    "a truth for a tag": ("tag", lambda g: g.send(X, 0, tag=True)),
    "a tag too large": ("tag", lambda g: g.send(X, 0, tag=1 << 63)),
    "a negative tag": ("tag", lambda g: g.send(X, 0, tag=-1)),
    "a truth for a rank": ("", lambda g: g.send(X, True)),
    "half a rank to send to": ("", lambda g: g.send(X, 0.5)),
    "half a rank to receive from": ("", lambda g: g.recv(0.5)),
    "counts that do not add up": ("send_counts", lambda g: g.all_to_all(X, send_counts=[1] * g.size)),
    "counts that are no whole numbers": ("", lambda g: g.all_to_all(X, send_counts=[4.5, *[-0.5] * (g.size - 1)])),
    "one count for all": ("", lambda g: g.all_to_all(X, send_counts=1)),
    "counts that are none": ("", lambda g: g.all_to_all(X, send_counts=[float("nan"), None][: g.size])),
    "a short out": ("", lambda g: g.all_reduce(X, out=X[:2].copy())),
    "an out of another dtype": ("float64", lambda g: g.all_reduce(X, out=np.ones(4))),
    "a list to receive into": ("", lambda g: g.recv(0, out=[1.0])),
    "text": ("", lambda g: g.all_reduce(np.array(["x"]))),
    "objects": ("cannot be sent", lambda g: g.all_reduce(np.array([None]))),
    "an object that cannot travel": ("", lambda g: g.all_gather_object(g)),
    "a root without an array": ("None", lambda g: g.broadcast(None, root=g.rank)),
    "too few parts": ("", lambda g: g.scatter([X] * (g.size - 1), root=g.rank)),
    "parts that are none": ("", lambda g: g.scatter(5, root=g.rank)),
    "an op that is no name": ("", lambda g: g.all_reduce(X, op=[1])),
    "an op that is unknown": ("unknown op", lambda g: g.all_reduce(X, op="average")),
    "the mean of whole numbers": ("whole numbers", lambda g: g.average({"n": np.ones(2, int)})),
}
"""What the error says, and the call."""

RANKS: dict[str, Callable[[Group, int], object]] = {
    "broadcast": lambda g, bad: g.broadcast(X, root=bad),
    "reduce": lambda g, bad: g.reduce(X, root=bad),
    "gather": lambda g, bad: g.gather(X, root=bad),
    "scatter": lambda g, bad: g.scatter([X] * g.size, root=bad),
    "broadcast_object": lambda g, bad: g.broadcast_object("x", root=bad),
    "gather_object": lambda g, bad: g.gather_object("x", root=bad),
    "shift": lambda g, bad: g.shift(X, bad, 0),
    "send": lambda g, bad: g.send(X, bad),
    "recv": lambda g, bad: g.recv(bad),
    "global_rank": lambda g, bad: g.global_rank(bad),
    "subgroup": lambda g, bad: g.subgroup([g.rank, bad]),
}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", MISTAKES)
def test_an_invalid_argument_raises_and_the_group_stays_usable(name: str, world: int) -> None:
    text, call = MISTAKES[name]

    def rank(group: Group) -> int:
        with pytest.raises(PacelineError, match=text or None) as caught:
            call(group)
        assert isinstance(caught.value, ValueError | TypeError), "and not the generation's end"
        return int(group.all_reduce(np.int64(1)))

    assert run_ranks(world, rank) == [world] * world


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_or_root_outside_the_world_is_invalid(name: str, world: int) -> None:
    def rank(group: Group) -> None:
        for bad in (-1, world, world + 4):
            with pytest.raises(InvalidRank, match=rf"{bad} .*world of {world}"):
                RANKS[name](group, bad)
        group.barrier()

    run_ranks(world, rank)


def test_a_rank_outside_a_subgroup_is_invalid_in_it() -> None:
    def rank(group: Group) -> None:
        part = group.subgroup([0, 2]) if group.rank != 1 else group.subgroup([1])
        for name in ("send", "recv", "global_rank"):
            with pytest.raises(InvalidRank, match=rf"2 .*world of {part.size}"):
                RANKS[name](part, 2)

    run_ranks(3, rank)


def test_a_world_of_zero_ranks_is_refused() -> None:
    with pytest.raises(InvalidWorldSize, match="not 0"):
        local_groups(0)
