"""Collectives, messages, subgroups and FSDP give the results in `reference_vectors.json`.

A vector whose name has `::` is one of the reference system's own unit tests, under its name; the others are the rows of
its contracts around them. Each holds over every kind of link, and a collective's by every schedule too. Lists by rank
may be `{"all": ...}`. Arrays are float32 unless the vector has a `dtype`; results are equal bit for bit.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import paceline
from paceline import FSDP, Parameter, ShardingStrategy, errors
from paceline._collectives.choose import choose as choose_by_rules
from paceline._collectives.schedules import SCHEDULES
from paceline._group import Group
from support.waiting import Background, wait_for
from support.worlds import run_over, scheduled, world_over

# Over gRPC these have pytest.mark.slow (support.worlds.EACH_LINK).

VECTORS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("reference_vectors.json").read_text())


def having(key: str) -> pytest.MarkDecorator:
    """The vectors that have such a key."""
    found = [vector for vector in VECTORS if key in vector]
    return pytest.mark.parametrize("vector", found, ids=[vector["name"] for vector in found])


def refused(error: list[str]) -> Any:
    kind, text = error
    return pytest.raises(getattr(errors, kind), match=text)


def array(value: Any, dtype: str = "f4") -> NDArray[Any]:
    return np.zeros(value["shape"], dtype) if isinstance(value, dict) else np.array(value, dtype)


def of_rank(values: Any, rank: int) -> Any:
    return values["all"] if isinstance(values, dict) else values[rank]


@having("call")
def test_collectives_match_the_vectors(vector: dict[str, Any], link: str) -> None:
    name, world, dtype = vector["call"], vector["world"], vector.get("dtype", "f4")
    members = vector.get("members", range(world))
    given = [array(of_rank(vector["given"], n), dtype) for n in range(len(members))]
    kept = [x.copy() for x in given]
    ways = [choose_by_rules, *scheduled(name).values()]
    if "schedules" in vector:
        ways = [scheduled(name)[schedule] for schedule in vector["schedules"]]

    def rank(group: Group) -> None:
        if group.rank not in members:
            return
        part = group.subgroup(members) if "members" in vector else group
        x = given[part.rank]
        call = partial(getattr(part, name), x, **vector.get("arguments", {}))
        call = partial(call, **of_rank(vector.get("by_rank", {"all": {}}), part.rank))
        if "error" in vector:
            with refused(vector["error"]):
                call()
            part.barrier()  # the mistake has cost nothing
            return
        expected = array(of_rank(vector["expected"], part.rank), dtype)
        for choose in ways:
            part._core.choose = choose
            result = call()
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(result, expected)
            assert not np.shares_memory(result, x)

    run_over(link, world, rank)
    for x, before in zip(given, kept, strict=True):
        np.testing.assert_array_equal(x, before, "the argument is never changed")


@having("messages")
def test_messages_match_the_vectors(vector: dict[str, Any], link: str) -> None:
    """Each is sent from one rank of the subgroup to another; those of a pair arrive in their order."""
    messages = [(source, to, array(x, vector.get("dtype", "f4"))) for source, to, x in vector["messages"]]

    def rank(group: Group) -> int:
        members = vector.get("members", range(group.size))
        if group.rank not in members:
            return 0
        part = group.subgroup(members) if "members" in vector else group
        for source, to, x in messages:
            if source == part.rank:
                part.send(x, to)
        mine = [(source, x) for source, to, x in messages if to == part.rank]
        for source, x in mine:
            received, sender = part.recv(source)
            assert (received.dtype, received.tobytes(), sender) == (x.dtype, x.tobytes(), source)
        return len(mine)

    assert sum(run_over(link, vector["world"], rank)) == len(messages)


@having("ranks")
def test_subgroups_match_the_vectors(vector: dict[str, Any], link: str) -> None:
    def rank(group: Group) -> None:
        expected = vector["ranks"][group.rank]
        if expected is None:
            return
        me, ranks = expected
        part = group.subgroup(vector["members"])
        assert (part.rank, part.size, list(part.ranks), part._core.parent is group._core) == (
            me,
            len(ranks),
            ranks,
            True,
        )
        assert [part.global_rank(n) for n in range(part.size)] == ranks
        assert [part.group_rank(n) for n in range(group.size)] == [
            ranks.index(n) if n in ranks else None for n in range(group.size)
        ]

    run_over(link, vector["world"], rank)


@having("at")
def test_invalid_subgroups_raise_the_error_of_the_vector(vector: dict[str, Any], link: str) -> None:
    def rank(group: Group) -> None:
        if group.rank == vector["at"]:
            with refused(vector["error"]):
                group.subgroup(vector["members"])

    run_over(link, vector["world"], rank)


@pytest.mark.parametrize("schedule", SCHEDULES["barrier"])
@having("barrier")
def test_a_barrier_waits_for_the_last_member(vector: dict[str, Any], schedule: str, link: str) -> None:
    """Nobody leaves before the last one has come."""
    members = vector["barrier"]
    for last in members:
        with world_over(link, vector["world"], choose=scheduled("barrier")[schedule]) as groups:
            parts = {rank: groups[rank].subgroup(members) for rank in members}
            early = [part for rank, part in parts.items() if rank != last]
            calls = [Background(part.barrier) for part in early]
            wait_for(lambda early=early: all(part._core.progress().inside for part in early))
            assert not any(call.ended for call in calls)
            parts[last].barrier()
            for call in calls:
                call.result()


def test_join_with_world_size_zero_raises_invalid_world_size() -> None:
    """It is backend::invalid_world_size."""
    with pytest.raises(errors.InvalidWorldSize):
        paceline.join("127.0.0.1:1", rank=0, world_size=0)


# FSDP.


class Scaled:
    """y = x * sum(w)."""

    def __init__(self, values: Any) -> None:
        self.w = Parameter(np.array(values, np.float32))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "w", self.w

    def forward(self, x: NDArray[Any]) -> NDArray[Any]:
        self.x = x
        return x * np.float32(self.w.data.sum())

    def backward(self, dy: NDArray[Any]) -> None:
        self.w.accumulate(np.full(self.w.shape, (dy * self.x).sum(), np.float32))


def words(fsdp: FSDP) -> dict[str, Callable[..., Any]]:
    """One rank's part in a step of a vector, and its result."""
    whole = fsdp.module.w
    ((_, part),) = fsdp.named_parameters()

    def clear() -> None:
        part.grad = whole.grad = None

    def gradient() -> Any:
        assert part.grad is None or (part.grad.dtype, part.grad.shape) == (np.float32, part.shape)
        return None if part.grad is None else part.grad.tolist()

    return {
        "forward": lambda x: fsdp(np.array([x], np.float32)).tolist(),
        "backward": lambda: fsdp.backward(np.ones(1, np.float32)),
        "prefetch": fsdp.prefetch_forward_params,
        "pending": fsdp.has_pending_prefetch,
        "piece": part.data.tolist,
        "requires_grad": lambda: part.requires_grad,
        "gradient": gradient,
        "padded gradient": lambda: fsdp.padded_gradients()["w"].tolist(),  # type: ignore[union-attr]
        "whole": lambda: whole.data.tolist(),
        "set whole": lambda values: whole.data.__setitem__(..., values),
        "write whole gradient": lambda values: setattr(whole, "grad", np.array(values, np.float32)),
        "clear": clear,
        "sync": fsdp.sync_gradients,
        "update": fsdp.update_shards,
        "broadcast": fsdp.broadcast_updated_params,
    }


@having("fsdp")
def test_fsdp_matches_the_vectors(vector: dict[str, Any], link: str) -> None:
    """A step is a word, its argument by rank, and what comes of it: a value by rank, or an error and its text."""

    def rank(group: Group) -> None:
        strategy = ShardingStrategy(vector.get("strategy", "full_shard"))
        if "error" in vector:
            with refused(vector["error"]):
                FSDP(Scaled(vector["w"]), group, strategy, vector["node"])
            return
        fsdp = FSDP(Scaled(vector["w"]), group, strategy, vector.get("node"))
        assert not group._core.recorder.snapshot(), "construction communicates nothing"
        for word, given, outcome in vector["fsdp"]:
            call = partial(words(fsdp)[word], *([] if given is None else [of_rank(given, group.rank)]))
            if isinstance(outcome, list) and isinstance(outcome[0], str):
                with refused(outcome):
                    call()
            else:
                expected = of_rank(outcome, group.rank)
                assert call() == (np.float32(expected).tolist() if isinstance(expected, list) else expected), word

    run_over(link, vector["world"], rank)


def test_the_vectors_include_all_unit_tests_of_the_reference() -> None:
    names = [vector["name"] for vector in VECTORS]
    assert len(names) == len(set(names))
    found = {name for each in names for name in re.findall(r"\w+::\w+", each)}
    counts = Counter(name.partition("::")[0] for name in found)
    # Also world_without_ranks; three of arithmetic are in unit/collectives/test_schedules, one is in
    # unit/group/test_invalid_arguments.
    assert counts == {"backend": 10, "ring": 5, "collective": 17, "fsdp": 21}
