"""A kind of link that is registered from outside: negotiated, checked and trained over like those of Paceline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from unit.parallel.helpers import N, mlp, train_ranks

from integration.fourth_kind import ThreadsKind
from integration.mixed_world import Place, kinds_of, mixed_world, run_all
from paceline._elastic.sampler import ElasticSampler
from paceline._group import Group
from paceline._links.base import Purpose
from paceline._links.registry import register, unregister
from paceline.config import Config
from paceline.optim import SGD
from paceline.testing import LinkPair, check_link, run_ranks
from support.grpc_pair import grpc_world

ALL = ("threads", "shm", "tcp", "grpc")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(ThreadsKind)
    yield
    unregister(ThreadsKind)


@contextmanager
def link_pair() -> Iterator[LinkPair]:
    with grpc_world(kind="threads") as world:
        a, b = world.meshes[0].link(1, Purpose.COLLECTIVE), world.meshes[1].link(0, Purpose.COLLECTIVE)
        yield LinkPair(a, b, *world.faults, partial(world.lose, 1))


@pytest.mark.alone  # some rules say how soon
def test_a_registered_kind_passes_the_link_checks() -> None:
    check_link(link_pair)


def test_training_over_a_registered_kind_is_bit_identical() -> None:
    def train(group: Group) -> dict[str, bytes]:
        sampler = ElasticSampler(N, 157, seed=3)
        weights = train_ranks(group, mlp(group.rank, "float32"), partial(SGD, lr=0.1, momentum=0.9), sampler, 6)
        return {path: values.tobytes() for path, values in weights.items()}

    with mixed_world([Place("a", ALL)] * 3) as world:
        found = run_all(world.groups, train)
        assert [set(kinds_of(mesh).values()) for mesh in world.meshes] == [{"threads"}] * 3
    assert found == run_ranks(3, train)


def test_pairs_without_the_registered_kind_use_another() -> None:
    places = [Place("a", ALL), Place("a"), Place("b", ALL), Place("b", ALL)]
    with mixed_world(places) as world:
        run_all(world.groups, lambda group: group.barrier())
        run_all(world.groups, lambda group: group.all_to_all(list(range(4))))
        assert [kinds_of(mesh) for mesh in world.meshes] == [
            {1: "shm", 2: "tcp", 3: "tcp"},
            {0: "shm", 2: "tcp", 3: "tcp"},
            {0: "tcp", 1: "tcp", 3: "threads"},
            {0: "tcp", 1: "tcp", 2: "threads"},
        ]


def test_a_link_that_cannot_open_falls_back_to_the_next_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadsKind, "_expected", property(lambda _: {}))
    with mixed_world([Place("a", ("threads", "tcp"))] * 2) as world:
        assert run_all(world.groups, lambda group: int(group.all_reduce(1))) == [2, 2]
        assert [set(kinds_of(mesh).values()) for mesh in world.meshes] == [{"tcp"}] * 2


def test_registering_a_taken_name_or_number_raises_value_error() -> None:
    class Other(ThreadsKind):
        name = "other"

    for kind in (ThreadsKind, Other):
        with pytest.raises(ValueError, match="is taken by ThreadsKind"):
            register(kind)
    with pytest.raises(ValueError, match="there is no kind of link 'other'"):
        Config(links=("other",))
