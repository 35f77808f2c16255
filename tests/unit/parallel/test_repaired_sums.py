"""An undone step through DDP: sums that ranks keep, in any mixture, give weights and buffers with the same bits."""

from __future__ import annotations

import hashlib
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.parallel.helpers import INPUTS, N, run_open, samples
from unit.parallel.test_microbatch_sums import Normed

from paceline import nn, optim
from paceline._base.sum_order import EVEN, SumsNotHeld
from paceline._elastic.sampler import ElasticSampler
from paceline._group import Group
from paceline._links.fault import Suspicion
from paceline._microbatch.attempt import StepAttempt
from paceline._microbatch.rank_plan import RankPlan, plan_ranks, usual_plan
from paceline._microbatch.sum_tree import Node
from paceline._parallel import DDP
from paceline.errors import PacelineError
from paceline.testing import next_generation
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.collective_calls import groups_by, quick
from support.microbatches import microbatches as in_turn

STEPS = 3


class Rank:
    """One rank, with a model that has statistics."""

    def __init__(self, group: Group, microbatches: int, bucket_mb: float) -> None:
        self.group, self.microbatches = group, microbatches
        self.x, self.t = samples(np.dtype("f4"))
        self.model = Normed(np.dtype("f4"))
        self.ddp = DDP(self.model, group, bucket_mb=bucket_mb)
        self.optimizer = optim.Adam(self.ddp, lr=0.01)
        self.sampler = ElasticSampler(N, global_batch=37, microbatches=microbatches)
        self.step = 0
        self.labels: list[object] = []

    def attempt(self, plan: RankPlan, count: int | None = None, *, undone: bool = False) -> None:
        """Computes its microbatches; or so many of them, or all, and undoes the step."""
        self.ddp.prepare()
        self.optimizer.zero_grad()
        before = [buffer.copy() for _, buffer in self.model.named_buffers()]
        held = self.ddp._synchronizer.held_sums()
        attempt = StepAttempt(plan, asks=True)
        attempt.divide(plan, held[0] if held else object())
        self.labels.append(attempt.label)
        for number in islice(in_turn(self.group, self.microbatches, attempt), count):
            indices, weight = self.sampler.current_microbatch(number)
            self.group._core.set_gradient_weight(weight)
            kept = np.random.default_rng([self.step, number]).random((len(indices), INPUTS)) > 0.2
            _, dy = nn.softmax_cross_entropy(self.ddp(self.x[indices] * kept), self.t[indices])
            self.ddp.backward(dy)
        self.group._core.set_order(EVEN)
        if count is None and not undone:
            self.optimizer.step()
            self.sampler.advance(1)
            self.step += 1
            self.labels.clear()
            return
        for (_, buffer), value in zip(self.model.named_buffers(), before, strict=True):
            buffer[...] = value
        self.ddp.drop_gradients()

    def held(self) -> tuple[Node, ...]:
        """What it keeps of this step, in a new generation."""
        found = self.ddp._synchronizer.held_sums()
        return () if found is None or found[0] not in self.labels else found[1]

    def digest(self) -> str:
        """Of everything."""
        digest = hashlib.sha256()
        for array in [*(p.data for _, p in self.model.named_parameters()), self.model.mean, self.model.count]:
            digest.update(array.tobytes())
        digest.update(repr(list(self.optimizer.state_dict().values())).encode())
        return digest.hexdigest()


def in_order(places: list[int], microbatches: int) -> tuple[RankPlan, ...]:
    """Plans of an undisturbed step, but each rank has those of another: as survivors whose ranks are new."""
    even = [usual_plan(place, len(places), microbatches) for place in places]
    nodes = tuple(share.nodes[share.rank] for share in even)
    return tuple(RankPlan(microbatches, rank, share.numbers, nodes) for rank, share in enumerate(even))


def quiet(microbatches: int) -> str:
    """The digest of one process."""
    (group,) = groups_by(1, "all_reduce", "direct")
    rank = Rank(group, microbatches, 25.0)
    for _ in range(STEPS):
        rank.attempt(usual_plan(0, 1, microbatches), None)
    return rank.digest()


@quick(max_examples=25)
@given(
    data=st.data(),
    world=st.integers(1, 4),
    microbatches=st.sampled_from([4, 5, 8]),
    bucket_mb=st.sampled_from([25.0, 1e-4]),
)
def test_any_mixture_of_kept_and_computed_sums_gives_the_same_bits(
    data: Any, world: int, microbatches: int, bucket_mb: float
) -> None:
    groups = groups_by(world, "all_reduce", "direct")
    ranks = [Rank(group, microbatches, bucket_mb) for group in groups]
    try:
        for _ in range(STEPS):
            shares = in_order(data.draw(st.permutations(range(world))), microbatches)
            for _ in range(data.draw(st.integers(0, 3), label="attempts that are undone")):
                # Either all have their sums, or none is in its last microbatch, where it would wait for the others.
                whole = data.draw(st.booleans(), label="undone after the sum")
                counts = [None if whole else data.draw(st.integers(0, len(share.numbers) - 1)) for share in shares]
                run_open(
                    groups, lambda g, of=shares, n=counts: ranks[g.rank].attempt(of[g.rank], n[g.rank], undone=True)
                )
                next_generation(groups)
                run_open(groups, lambda g: ranks[g.rank].ddp.prepare())
                held = [rank.held() for rank in ranks]
                lost = data.draw(st.sets(st.integers(0, world - 1)), label="ranks that died and came back with nothing")
                shares = plan_ranks(
                    tuple(() if rank in lost else nodes for rank, nodes in enumerate(held)), microbatches
                )
            run_open(groups, lambda g, of=shares: ranks[g.rank].attempt(of[g.rank]))
    finally:
        for group in groups:
            group.close()
    assert {rank.digest() for rank in ranks} == {quiet(microbatches)}


def test_ranks_without_microbatches_left_repeat_one_and_drop_it() -> None:
    """Rank 0 of 3 has lost its only microbatch, with the statistics of the step; two others have nothing to compute."""
    groups = groups_by(3, "all_reduce", "direct")
    ranks = [Rank(group, 3, 1e-4) for group in groups]
    for _ in range(STEPS):
        run_open(groups, lambda g: ranks[g.rank].attempt(usual_plan(g.rank, 3, 3), undone=True))
        next_generation(groups)
        run_open(groups, lambda g: ranks[g.rank].ddp.prepare())
        shares = plan_ranks(((), ranks[1].held(), ranks[2].held()), 3)
        assert [share.repeats for share in shares] == [True, True, False]
        assert shares[0].root == 2
        run_open(groups, lambda g, of=shares: ranks[g.rank].attempt(of[g.rank]))
    for group in groups:
        group.close()
    assert {rank.digest() for rank in ranks} == {quiet(3)}


def alone(bucket_mb: float = 1e-4) -> Rank:
    """One rank with four microbatches and many buckets, as if another had the other four; nothing can be sent."""
    (group,) = groups_by(1, "all_reduce", "direct")
    return Rank(group, 8, bucket_mb)


@pytest.mark.parametrize("sent", ["some", "all"])
def test_an_interrupted_pass_leaves_no_kept_sums(sent: str) -> None:
    """Buckets may hold the microbatch already: not all of them, or without a gradient that would have come later."""
    rank = alone()
    rank.x[:, 0] = 9.0  # all parameters are used in all microbatches
    share = usual_plan(0, 2, 8)
    rank.attempt(share, 3)
    assert rank.held() == ((0, 2), (2, 3))
    last = rank.model.body.modules[0] if sent == "some" else rank.model
    backward, calls = last.backward, iter(range(4))

    def interrupted(dy: Any) -> Any:
        done = backward(dy) if sent == "all" or calls.__length_hint__() > 1 else None
        return done if next(calls) < 3 else 1 // 0  # in the last microbatch

    last.backward = interrupted
    with pytest.raises(ZeroDivisionError):
        rank.attempt(share, 4)
    rank.group._core.set_order(EVEN)
    assert rank.held() == ()


def test_a_pass_completes_after_a_peer_failure_and_keeps_its_sum() -> None:
    groups = groups_by(2, "all_reduce", "direct")
    ranks = [Rank(group, 8, 1e-4) for group in groups]
    run_open(groups, lambda g: ranks[g.rank].attempt(usual_plan(g.rank, 2, 8)))
    first = ranks[0].model.body.modules[0]
    backward = first.backward

    def failing(dy: Any) -> Any:
        if groups[0]._core.order.is_leaf and groups[0]._core.order.is_last:
            reason = ErrorReason.ERROR_REASON_PEER_LOST
            groups[0]._core.mesh.fault.suspect(Suspicion(reason, 1, 0, "rank 1 is gone"))
        return backward(dy)

    first.backward = failing
    with pytest.raises(PacelineError, match="rank 1 is gone"):
        run_open(groups[:1], lambda g: ranks[0].attempt(usual_plan(0, 2, 8)))
    groups[0]._core.set_order(EVEN)
    next_generation(groups)
    run_open(groups, lambda g: ranks[g.rank].ddp.prepare())
    assert ranks[0].held() == ((0, 4),)
    for group in groups:
        group.close()


def test_a_wrapper_without_the_planned_sums_raises_sums_not_held() -> None:
    rank = alone()
    share, *_ = plan_ranks((((0, 4),),), 8)
    with pytest.raises(SumsNotHeld):
        rank.attempt(share, 1)


def test_sums_of_another_attempt_are_not_used() -> None:
    rank = alone()
    rank.attempt(usual_plan(0, 1, 8), 4, undone=True)
    assert rank.held() == ((0, 4),)
    plan, *_ = plan_ranks((((0, 4),),), 8)
    attempt = StepAttempt(plan, asks=True)
    attempt.divide(plan, object())  # what was told is of another attempt
    with pytest.raises(SumsNotHeld):
        rank.ddp._synchronizer.reducer.begin_pass(attempt.turns()[0])  # type: ignore[union-attr]


def test_kept_sums_carry_no_step_word() -> None:
    rank = alone(25.0)
    rank.attempt(usual_plan(0, 1, 8), 2)
    (bucket,) = rank.ddp._model.reducer._buckets  # type: ignore[union-attr]
    assert bucket.nodes == ((0, 2),)
    ((_, memory),) = bucket._sums
    memory.flat[-1] = 7.0  # as if it had been sent with one
    bucket.keep_nodes(((0, 2),), spare=0)
    assert memory.flat[-1] == 0
    bucket.keep_nodes((), spare=1)
    assert bucket.nodes == ()
    assert len(bucket._spare) == 1, "a repair takes more memory than other steps, for a while"
