"""Ranks that disagree: every rank gets one error that names both sides, and nothing hangs."""

import re
import threading
from typing import Any
from unittest import mock

import numpy as np
import pytest

from paceline.config import Config
from paceline.errors import CollectiveMismatch, PacelineError
from paceline.testing import local_groups

X = np.ones(4, np.float32)

CASES = {
    "op": (lambda g: g.all_reduce(X, op="sum"), lambda g: g.all_reduce(X, op="max"), "op=sum", "op=max"),
    "dtype": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X.astype("i4")), r"float32\[4\]", r"int32\[4\]"),
    "shape": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X.reshape(2, 2)), r"float32\[4\]", r"float32\[2,2\]"),
    "length": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(X[:0]), r"float32\[4\]", r"float32\[0\]"),
    "size": (lambda g: g.all_reduce(X), lambda g: g.all_reduce(np.ones(1 << 17)), r"\[4\]", r"\[131072\]"),
    "kind": (lambda g: g.all_reduce(X), lambda g: g.barrier(), "all_reduce", "barrier"),
    "kind of a broadcast": (lambda g: g.broadcast(X), lambda g: g.all_reduce(X), "broadcast", "all_reduce"),
    "shape of a broadcast": (lambda g: g.broadcast(X), lambda g: g.broadcast(X[:2]), r"\[4\]", r"\[2\]"),
    "tree": (lambda g: g.average({"a": X}), lambda g: g.average({"b": X}), "tree=", "tree="),
}


def outcomes(world: int, first: Any, other: Any, odd: Any) -> Any:
    """What each rank raises when rank `odd` calls something else, and all call a barrier behind it."""
    groups = local_groups(world, Config(failure_timeout=0.6))
    errors: list[BaseException | None] = [None] * world

    def run(rank: int) -> Any:
        try:
            (other if rank == odd else first)(groups[rank])
            groups[rank].barrier()
        except PacelineError as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for group in groups:
        group.close()
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_is_told_of_both_sides(name: Any, world: int) -> None:
    first, other, one, two = CASES[name]
    odd = world - 1
    errors = outcomes(world, first, other, odd)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, CollectiveMismatch), repr(error)
        assert odd in error.ranks
        assert len(error.ranks) == 2
        assert error.operation == 1
    text = str(errors[0])
    assert f"rank {odd} (local)" in text
    for pattern in (one, two):
        assert re.search(pattern, text), text


@pytest.mark.parametrize("roots", [(0, 1), (1, 0), (0, 0, 0, 2), (3, 3, 3, 0), (0, 1, 2), (1, 2, 0), (2, 2, 2, 2, 0)])
@pytest.mark.parametrize("known", [True, False])
def test_roots_that_differ(roots: Any, known: Any) -> None:
    """Here the tree may leave ranks waiting for each other with nothing sent: they must find out."""
    groups = local_groups(len(roots), Config(failure_timeout=0.6))
    errors: list[BaseException | None] = [None] * len(roots)

    def run(rank: int) -> Any:
        group = groups[rank]
        try:
            group.broadcast(X if known or roots[rank] == rank else None, root=roots[rank])
            group.barrier()
        except PacelineError as error:
            errors[rank] = error

    with mock.patch("paceline._collectives.exchange.PATIENCE", 0.05):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(roots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    for group in groups:
        group.close()
    assert all(isinstance(error, CollectiveMismatch) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert "root=" in str(errors[0])


def test_two_roots_that_both_send_more_than_links_hold() -> None:
    groups = local_groups(2, Config(failure_timeout=0.6))
    errors: list[BaseException | None] = [None] * 2

    def run(rank: int) -> None:
        try:
            groups[rank].broadcast(np.ones(1000), root=rank)
        except PacelineError as error:
            errors[rank] = error

    with (
        mock.patch("paceline._collectives.exchange.PATIENCE", 0.05),
        mock.patch("paceline._collectives.tasks.SEGMENT_BYTES", 64),
    ):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    for group in groups:
        group.close()
    assert all(isinstance(error, CollectiveMismatch) for error in errors), errors
    assert "root=0" in str(errors[0])
    assert "root=1" in str(errors[0])


def test_an_honest_straggler_is_no_disagreement() -> None:
    groups = local_groups(3)
    late = threading.Event()
    results = [0.0] * 3

    def run(rank: int) -> Any:
        if rank == 2:
            late.wait(10)
        for i in range(3):
            groups[rank].broadcast(X if rank == i else None, root=i)
            results[rank] += float(groups[rank].all_reduce(X)[0])

    with mock.patch("paceline._collectives.exchange.PATIENCE", 0.01):
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
        for thread in threads:
            thread.start()
        threads[0].join(0.1)  # the others lose patience several times
        late.set()
        for thread in threads:
            thread.join(20)
    for group in groups:
        group.close()
    assert results == [9.0] * 3
