"""FSDP while the view changes under it: ranks, sizes and members are others, and training is that of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from unit.elastic.resharding import all_do, form
from unit.elastic.solo import ENVIRONMENT, fail

import paceline
from paceline import nn
from paceline._elastic.train_state import TrainState
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline._links.nowhere import NoMesh
from paceline.errors import InvalidWorldSize, StepOrderError, UnsupportedOp
from paceline_protocol import WHOLE, Share
from support.parts import SOON, each

N, BATCH = 30, 7
NO_SHARD = paceline.ShardingStrategy.NO_SHARD
HYBRID = paceline.ShardingStrategy.HYBRID_SHARD
SPREADING = [strategy for strategy in paceline.ShardingStrategy if strategy is not NO_SHARD]

rng = np.random.default_rng(4)
X, T = rng.standard_normal((N, 5)), rng.integers(0, 3, N)
SAMPLER = paceline.ElasticSampler(N, global_batch=BATCH)


_made: list[Group] = []


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    while _made:
        _made.pop().close(0.2)


def group_of(mesh: Any) -> Group:
    _made.append(Group(mesh, SOON))
    return _made[-1]


class Counting(nn.Sequential):
    """With a buffer that forward changes, another way on each rank."""

    def __init__(self, *modules: Any) -> None:
        super().__init__(*modules)
        self.seen = np.zeros(2)

    def named_buffers(self) -> Any:
        yield "seen", self.seen

    def forward(self, x: Any) -> Any:
        self.seen += x.sum()
        return super().forward(x)


def build(seed: int, wrap: Callable[[Any], Any] = lambda module: module) -> Any:
    values = np.random.default_rng(seed)
    inner = wrap(nn.Sequential(nn.Linear(5, 6, rng=values, dtype=np.float64), nn.ReLU()))
    return wrap(Counting(inner, wrap(nn.Linear(6, 4, rng=values, dtype=np.float64)), nn.ReLU(),
                         nn.Linear(4, 3, rng=values, dtype=np.float64)))  # fmt: skip


class Worker:
    """One process, as it were."""

    def __init__(self, seed: int, group: Any = None, strategy: Any = NO_SHARD) -> None:
        self.group = group_of(NoMesh("waits")) if group is None else group
        self.model = build(seed, lambda module: paceline.FSDP(module, self.group, strategy))
        self.optimizer = paceline.optim.Adam(self.model, lr=0.05)
        self.state = TrainState(model=self.model, optimizer=self.optimizer)

    def step(self, number: int, micro_batches: int = 1) -> None:
        indices, weight = SAMPLER.share(number, self.group.rank, self.group.size)
        self.optimizer.zero_grad()
        parts = np.array_split(indices, min(micro_batches, len(indices)))
        with self.model.no_sync():
            for part in parts[:-1]:
                self.backward(part, weight * len(part) / len(indices))
        self.backward(parts[-1], weight * len(parts[-1]) / len(indices))
        self.optimizer.step()

    def backward(self, indices: Any, weight: float) -> None:
        _, dy = nn.softmax_cross_entropy(self.model(X[indices]), T[indices])
        self.model.backward(dy, weight)


def plain(seed: int, steps: int) -> list[Any]:
    model = build(seed)
    optimizer = paceline.optim.Adam(model, lr=0.05)
    for number in range(steps):
        _, dy = nn.softmax_cross_entropy(model.forward(X[SAMPLER.batch(number)]), T[SAMPLER.batch(number)])
        optimizer.zero_grad()
        model.backward(dy)
        optimizer.step()
    return [p.data.copy() for _, p in model.named_parameters()]


VIEWS = ["AB", "BCA", "C", "CA", "ADCB", "D"]


@pytest.mark.parametrize("vouched", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_across_views_equals_training_in_one_process(vouched: bool, micro_batches: int) -> None:
    workers = {name: Worker(seed) for seed, name in enumerate("ABCD")}
    everybody: set[str] = set()
    for n, view in enumerate(VIEWS):
        here = [workers[name] for name in view]
        holder = next(iter(everybody & set(view)), "A")
        for name in set(view) - everybody:  # what `steps` would have it take; the first view's agree by themselves
            if n or vouched:
                workers[name].state.load_state_dict(workers[holder].state.state_dict())
        form(here, n + 1, vouched=vouched)
        for number in (2 * n, 2 * n + 1):
            all_do(here, lambda worker, number=number: worker.step(number, micro_batches))
        everybody = set(view)
        flats = [[array.tobytes() for array in worker.state._core.large()] for worker in here]
        assert all(flat == flats[0] for flat in flats), view
        seen = [worker.model.module.seen.tolist() for worker in here]
        assert all(each == seen[0] for each in seen)
        weights = plain(0, 2 * n + 2)
        for mine, expected in zip(here[0].state._core.large(), weights, strict=False):
            np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("first_use", ["forward", "sync_gradients"])
def test_a_newcomer_at_rank_0_with_confirmed_state_can_train(first_use: str) -> None:
    old, new = Worker(1), Worker(2)
    form([old], 1, vouched=False)
    all_do([old], lambda worker: worker.step(0))
    new.state.load_state_dict(old.state.state_dict())
    form([new, old], 2, vouched=True)

    def use(worker: Worker) -> None:
        if first_use == "forward":
            worker.step(1)
            return
        worker.model.module.modules[-1].weight.grad = np.full((3, 4), worker.group.rank + 1.0)
        worker.model.sync_gradients(weight=1)
        assert dict(worker.model.named_parameters())["3.weight"].grad[0, 0] == 1.5

    all_do([old, new], use)


def test_a_step_undone_during_accumulation_leaves_no_gradients() -> None:
    one, other = Worker(1), Worker(1)
    form([one, other], 1, vouched=False)

    def interrupted(worker: Worker) -> None:
        small = worker.state._core.small()
        with worker.model.no_sync():
            worker.backward(np.arange(3), 1.0)
        worker.state._core.undo(small)

    all_do([one, other], interrupted)
    form([one, other], 2, vouched=True)
    all_do([one, other], lambda worker: worker.step(0, 2))
    for mine, expected in zip(one.state._core.large(), plain(1, 1), strict=False):
        np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wrapper", [paceline.FSDP, paceline.DDP])
def test_gradients_of_an_open_round_are_dropped_when_the_view_changes(wrapper: Any) -> None:
    group = group_of(local_meshes(1)[0])
    model = build(1)
    wrapped = wrapper(model, group)
    optimizer = paceline.optim.SGD(wrapped, lr=1.0)
    dy = nn.softmax_cross_entropy(wrapped(X[:4]), T[:4])[1]
    with wrapped.no_sync():
        wrapped.backward(dy)
    group._core.move(local_meshes(1, generation=2)[0])
    wrapped(X[:4])
    wrapped.backward(dy)
    gradient = {path: copy.copy(p.grad) for path, p in wrapped.named_parameters()}
    optimizer.zero_grad()
    wrapped(X[:4])
    wrapped.backward(dy)
    for path, p in wrapped.named_parameters():
        np.testing.assert_array_equal(p.grad, gradient[path])


@pytest.mark.parametrize("wrapper", [paceline.FSDP, paceline.DDP])
def test_uncleared_gradients_accumulate_across_a_view_change(wrapper: Any) -> None:
    """Who does not clear gradients accumulates them: in the next generation too."""
    group = group_of(local_meshes(1)[0])
    wrapped = wrapper(build(1), group)
    dy = nn.softmax_cross_entropy(wrapped(X[:4]), T[:4])[1]
    wrapped.backward(dy)
    once = [p.grad.copy() for _, p in wrapped.named_parameters()]
    group._core.move(local_meshes(1, generation=2)[0])
    wrapped(X[:4])
    wrapped.backward(dy)
    for (_, p), before in zip(wrapped.named_parameters(), once, strict=True):
        np.testing.assert_array_equal(p.grad, 2 * before)


@pytest.mark.parametrize("wrapper", [paceline.FSDP, paceline.DDP])
def test_gradients_written_by_hand_after_an_undone_step_are_synced(wrapper: Any) -> None:
    group = group_of(local_meshes(1)[0])
    model = build(1)
    last = model.modules[-1].weight
    wrapped = wrapper(model, group)
    state = TrainState(model=wrapped)
    small = state._core.small()
    with wrapped.no_sync():
        wrapped.backward(nn.softmax_cross_entropy(wrapped(X[:4]), T[:4])[1])
    state._core.undo(small)
    group._core.move(local_meshes(1, generation=2)[0])
    last.accumulate(np.ones((3, 4)))
    wrapped.sync_gradients(weight=1)
    assert (dict(wrapped.named_parameters())["3.weight"].grad == 1).all()


def test_an_fsdp_unit_prepared_in_an_earlier_view_can_be_wrapped_again() -> None:
    group = group_of(local_meshes(1)[0])
    block = paceline.FSDP(nn.Linear(5, 3, rng=rng, dtype=np.float64), group, NO_SHARD)
    block.prepare()
    group._core.move(local_meshes(1, generation=2)[0])
    whole = paceline.FSDP(nn.Sequential(block, nn.ReLU()), group, NO_SHARD)
    whole.backward(nn.softmax_cross_entropy(whole(X[:4]), T[:4])[1])
    assert all(p.grad is not None for _, p in whole.named_parameters())


def test_a_wrapped_model_of_a_candidate_refuses_to_run() -> None:
    worker = Worker(0)
    for wrapped in (worker.model, paceline.DDP(build(1), worker.group)):
        with pytest.raises(StepOrderError, match="waits"):
            wrapped(X[:2])


@pytest.mark.parametrize("strategy", SPREADING)
def test_shards_stay_usable_at_the_same_rank_and_move_only_in_steps(strategy: Any) -> None:
    meshes = local_meshes(2)
    workers = [Worker(0, group_of(mesh), strategy) for mesh in meshes]
    all_do(workers, lambda worker: worker.step(0))
    form(workers, 2, vouched=False)
    all_do(workers, lambda worker: worker.step(1))
    full: dict[int, Any] = {}
    all_do(workers, lambda worker: full.update({worker.group.rank: worker.model.state_dict()}))
    for mine, expected in zip(full[1].values(), plain(0, 2), strict=False):
        np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)
    form(workers[:1], 3, vouched=False)
    with pytest.raises(
        UnsupportedOp, match=r"has shard 0 of 2, and would have shard 0 of 1 .*shards move only in session\.steps"
    ):
        workers[0].step(2)


@pytest.mark.parametrize("strategy", list(paceline.ShardingStrategy))
def test_retried_steps_in_a_world_of_one_equal_plain_training(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    with paceline.join() as session:
        worker = Worker(0, session.group, strategy)
        for step in session.steps(worker.state, total=4):
            with step:
                worker.optimizer.zero_grad()
                with worker.model.no_sync():
                    worker.backward(SAMPLER.batch(step.number - 1)[:2], 2)
                if step.number == 2 and step.attempt < 3:
                    fail(session)
                worker.backward(SAMPLER.batch(step.number - 1)[2:], len(SAMPLER.batch(step.number - 1)) - 2)
                worker.optimizer.step()
        for mine, expected in zip(worker.state._core.large(), plain(0, 4), strict=False):
            np.testing.assert_allclose(mine, expected, rtol=1e-10, atol=1e-12)


def test_hybrid_shard_refuses_to_prepare_until_nodes_are_complete() -> None:
    groups = [group_of(mesh) for mesh in local_meshes(3)]
    with pytest.raises(InvalidWorldSize, match=r"world_size=3 .*intra_node_size=2.*largest available multiple"):
        paceline.FSDP(build(0), groups[0], HYBRID, 2)
    for group in groups:
        group._core.make_elastic(4)
    with pytest.raises(InvalidWorldSize, match="intra_node_size=0"):
        paceline.FSDP(build(0), groups[0], HYBRID, 0)
    with pytest.raises(
        InvalidWorldSize, match=r"at most 4 workers train, so a node of intra_node_size=5 can never form"
    ):
        paceline.FSDP(build(0), groups[0], HYBRID, 5)
    models = [paceline.FSDP(build(0), group, HYBRID, 2) for group in groups]
    states = [TrainState(model=model) for model in models]
    assert {(state._core.node_size, state._core.shares()) for state in states} == {(2, (WHOLE,))}
    for outcome in each(groups, lambda group: models[group.rank].prepare()):
        assert isinstance(outcome, InvalidWorldSize), "they cannot train so"
    for rank, (group, mesh) in enumerate(zip(groups[:2], local_meshes(2, generation=2), strict=True)):
        states[rank]._core.switch(states[rank]._core.resharding(Share(rank, 2)))
        group._core.move(mesh)
    assert each(groups[:2], lambda group: models[group.rank].prepare()) == [None, None]
    assert [state._core.shares()[0] for state in states] == [Share(0, 2), Share(1, 2), WHOLE]
