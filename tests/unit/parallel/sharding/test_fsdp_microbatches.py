"""Microbatches with FSDP: every strategy has the bits of DDP and of one process in every world."""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.parallel.helpers import CLASSES, INPUTS, N, mlp, samples
from unit.parallel.sharding.models import cases, chosen

import paceline
from paceline import nn, optim
from paceline._base.shares import Shares, range_of
from paceline._base.sum_order import EVEN
from paceline._elastic.sampler import ElasticSampler
from paceline._group import Group
from paceline._microbatch.sum_tree import maximal_subtrees
from paceline._parallel import DDP, FSDP, Parameter
from paceline._parallel.sharding._tree_sums import TreeSums
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.testing import run_ranks
from support.microbatches import microbatches as in_turn

STEPS = 3


class Gated:
    """A block that about one microbatch in two leaves unused, with running statistics."""

    def __init__(self, dtype: Any) -> None:
        self.gate = Parameter(np.ones(CLASSES, dtype))
        self.mean = np.zeros(CLASSES, dtype)
        self._used = False

    def named_parameters(self) -> Any:
        yield "gate", self.gate

    def named_buffers(self) -> Any:
        return [("mean", self.mean)]

    def forward(self, y: Any) -> Any:
        y = y - self.mean
        self.mean[...] = 0.9 * self.mean + 0.1 * y.mean(axis=0)
        self._y, self._used = y, int(abs(y[0, 0]) * 1000) % 2 == 0
        return y * self.gate.data if self._used else y

    def backward(self, dy: Any) -> Any:
        if self._used:
            self.gate.accumulate((dy * self._y).sum(axis=0))
            dy = dy * self.gate.data
        return dy


class Model:
    """Blocks one after the other, some of them units of their own."""

    def __init__(self, blocks: list[Any]) -> None:
        self.blocks = blocks

    def named_parameters(self) -> Any:
        for number, block in enumerate(self.blocks):
            yield from ((f"{number}.{path}", p) for path, p in block.named_parameters())

    def named_buffers(self) -> Any:
        return [
            (f"{number}.{path}", buffer)
            for number, block in enumerate(self.blocks)
            for path, buffer in getattr(block, "named_buffers", lambda: [])()
        ]

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block.forward(x)
        return x

    def backward(self, dy: Any) -> Any:
        for block in reversed(self.blocks):
            dy = block.backward(dy)
        return dy


def blocks_of(dtype: Any) -> list[Any]:
    return [*mlp(3, dtype).modules, Gated(dtype)]


def wrapped(group: Group, dtype: Any, name: str) -> Any:
    """The model in DDP, or in FSDP with some blocks as units."""
    if name == "ddp":
        return DDP(Model(blocks_of(dtype)), group, bucket_mb=1e-3)
    wrap = partial(FSDP, group=group, **chosen(name))
    return wrap(Model([wrap(block) if n in (0, 4, 5) else block for n, block in enumerate(blocks_of(dtype))]))


def in_microbatches(group: Group, sampler: ElasticSampler, compute: Any, shares: Shares | None = None) -> None:
    """The microbatches of a step of `session.steps`, without a coordinator."""
    for number in in_turn(group, sampler.microbatches, shares=shares):
        indices, weight = sampler.current_microbatch(number)
        group._core.set_gradient_weight(weight)
        compute(number, indices)


def train(
    group: Group,
    name: str,
    *,
    microbatches: int,
    dtype: Any,
    batch: int,
    p: float,
    shares: tuple[Shares, ...] = (),
) -> tuple[str, str]:
    """Returns a digest of weights and buffers, and one of the whole state. `shares` are those of each step."""
    x, t = samples(dtype)
    model = wrapped(group, dtype, name)
    optimizer = optim.Adam(model, lr=0.01)
    sampler = ElasticSampler(N, global_batch=batch, microbatches=microbatches)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in range(STEPS):
        optimizer.zero_grad()

        def compute(number: int, indices: Any, step: int = step) -> None:
            kept = np.random.default_rng([step, number]).random((len(indices), INPUTS)) > 0.2
            _, dy = nn.softmax_cross_entropy(model(x[indices] * kept), t[indices])
            model.backward(dy)

        in_microbatches(group, sampler, compute, shares[step] if shares else None)
        model.clip_grad_norm(0.2, p)
        optimizer.step()
        sampler.advance(group.size)
    group._core.set_order(EVEN)
    digest = hashlib.sha256()
    if isinstance(model, DDP):
        weights = {path: p.data for path, p in model.module.named_parameters()} | dict(model.module.named_buffers())
    else:
        weights = model.state_dict()
    for path, array in sorted(weights.items()):
        digest.update(path.encode() + array.tobytes())
    return digest.hexdigest(), state.fingerprint().hex()


@pytest.mark.parametrize(
    ("microbatches", "dtype", "batch", "p"), [(8, "f8", 61, 2.0), (7, "f4", 60, math.inf), (6, "f4", 3, 3.0)],
    ids=["shares of two sizes", "no power of two", "empty microbatches"],
)  # fmt: skip
def test_every_strategy_and_world_size_has_the_bits_of_one_process(
    microbatches: int, dtype: str, batch: int, p: float
) -> None:
    run = partial(train, microbatches=microbatches, dtype=np.dtype(dtype), batch=batch, p=p)
    found = {
        case: set(run_ranks(case[0], partial(run, name=case[1])))
        for world in (1, 2, 3, 4)
        for case in [(world, "ddp"), *cases(world)]
    }
    assert len({weights for digests in found.values() for weights, _ in digests}) == 1, found
    assert len({whole for digests in found.values() for _, whole in digests}) == 1, found


def test_every_strategy_has_the_bits_of_one_process_with_unequal_shares() -> None:
    """The shares change from step to step, as they do when they follow speeds."""
    run = partial(train, microbatches=9, dtype=np.dtype("f4"), batch=60, p=2.0)
    (alone,) = run_ranks(1, partial(run, name="ddp"))
    for world, *shares in ((2, (1, 8), (6, 3), (2, 7)), (3, (1, 1, 7), (4, 2, 3), (1, 5, 3)), (4, (1, 5, 1, 2))):
        steps = (shares * STEPS)[:STEPS]
        for case in [(world, "ddp"), *cases(world)]:
            assert set(run_ranks(world, partial(run, name=case[1], shares=steps))) == {alone}, (case, steps)


@given(world=st.integers(1, 9), more=st.integers(0, 14))
@settings(deadline=None, max_examples=60)
def test_tree_sums_form_the_maximal_subtrees_of_adjacent_nodes(world: int, more: int) -> None:
    """Of a rank's microbatches, and of the subtrees that the ranks of a node exchange."""
    microbatches = world + more
    for lo, hi in [range_of(rank, world, microbatches) for rank in range(world)]:
        sums = TreeSums(microbatches)
        for number in range(lo, hi):
            sums.add((number, number + 1), np.array([float(number)]))
        nodes = maximal_subtrees(lo, hi, microbatches)
        assert [term.item() for term in sums.terms] == [sum(range(*node)) for node in nodes]
    for size in (size for size in range(1, world + 1) if world % size == 0):
        for node in range(world // size):
            ranks = range(node * size, (node + 1) * size)
            sums = TreeSums(microbatches)
            for subtree in (
                s for rank in ranks for s in maximal_subtrees(*range_of(rank, world, microbatches), microbatches)
            ):
                sums.add(subtree, np.array([float(sum(range(*subtree)))]))
            as_a_rank = maximal_subtrees(*range_of(node, world // size, microbatches), microbatches)
            assert [term.item() for term in sums.terms] == [sum(range(*subtree)) for subtree in as_a_rank]


def test_tree_sums_free_arrays_for_reuse() -> None:
    sums = TreeSums(8)
    arrays = [np.ones(1) for _ in range(8)]
    freed = [sums.add((number, number + 1), array) for number, array in enumerate(arrays)]
    assert [len(free) for free in freed] == [0, 1, 0, 2, 0, 1, 0, 3]
    assert {id(array) for free in freed for array in free} == set(map(id, arrays[:-1]))
    assert sums.terms[0].item() == 8


def one_step(group: Group, model: Any, *, backward: bool = True) -> None:
    x, t = samples(np.dtype("f4"))

    def compute(number: int, indices: Any) -> None:
        _, dy = nn.softmax_cross_entropy(model(x[indices]), t[indices])
        if backward:
            model.backward(dy)

    in_microbatches(group, ElasticSampler(N, global_batch=61, microbatches=8), compute)


def test_units_are_gathered_once_for_a_step_and_freed_at_its_end() -> None:
    """With two microbatches on one rank and three on others, all ranks gather equally often."""

    def gathers(group: Group) -> tuple[list[str], bool, bool]:
        model = wrapped(group, np.dtype("f4"), "full")
        model.prepare()
        inner = model._sharded.units()[1].flats[0]
        found: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            real = group.all_gather
            patch.setattr(group, "all_gather", lambda x, **how: found.append(how["label"]) or real(x, **how))
            one_step(group, model, backward=False)
            was_whole = inner.is_whole
            model.drop_gradients()
            one_step(group, model)
        return found, was_whole, inner.is_whole

    (first, whole, after), *others = run_ranks(3, gathers)
    assert all(other == (first, whole, after) for other in others)
    assert whole, "it is needed in the rank's later microbatches"
    assert not after
    assert len(first) == 2 * len(set(first)), f"each unit once in each of two attempts, not {first}"


def test_unsupported_uses_of_microbatches_are_refused() -> None:
    def rounded(group: Group) -> None:
        one_step(group, FSDP(mlp(3, "f4"), group, communication_dtype="f2"))

    def odd_nodes(group: Group) -> None:
        model = FSDP(mlp(3, "f4"), group, **chosen("hybrid2"))
        model.prepare()
        object.__setattr__(model._sharded.unit.placement, "nodes", ((0, 2), (1, 3)))
        one_step(group, model)

    def other_units(group: Group, *, few: int) -> None:
        blocks = blocks_of(np.dtype("f4"))[:-1]
        extra = FSDP(nn.Linear(CLASSES, CLASSES, rng=np.random.default_rng(1), dtype="f4"), group)
        model = FSDP(Model([*blocks, extra]), group)
        model.prepare()

        def compute(number: int, indices: Any) -> None:
            x, t = samples(np.dtype("f4"))
            model.module.blocks = [*blocks, extra] if (number == 1) != (few == 1) else blocks
            _, dy = nn.softmax_cross_entropy(model(x[indices]), t[indices])
            model.backward(dy)

        in_microbatches(group, ElasticSampler(N, global_batch=61, microbatches=8), compute)

    with pytest.raises(UnsupportedOp, match="a single worker sends none, so the bits would depend"):
        run_ranks(1, rounded)
    with pytest.raises(UnsupportedOp, match="do not have adjacent ranks"):
        run_ranks(4, odd_nodes)
    for few in (0, 1):  # too many, too few
        for world in (1, 2):
            with pytest.raises(StepOrderError, match="microbatch 1 does not run the same units as this rank's"):
                run_ranks(world, lambda group, few=few: other_units(group, few=few))
