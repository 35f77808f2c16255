"""Parts with torch: the same bits in every world, samples by way of a loader, and what is refused."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
import paceline.torch
from paceline._base.sum_order import EVEN
from paceline._group import Group
from paceline.errors import StepOrderError, UnsupportedOp
from paceline.testing import run_ranks
from support.microbatches import microbatches as in_turn

pytestmark = [pytest.mark.needs(what="torch")]

V, N, BATCH = 8, 90, 29


_seeding = threading.Lock()
"""Ranks are threads, which share torch's generator."""


class Net(nn.Module):
    """Convolutions, running statistics, and a parameter that not every microbatch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 5, 3), nn.BatchNorm1d(5), nn.ReLU(), nn.Flatten(), nn.Linear(50, 4))
        self.gate = nn.Parameter(torch.ones(4))

    def forward(self, x: Any) -> Any:
        y = self.body(x)
        return y * self.gate if x[0, 0, 0] > 0 else y


def train(group: Group, dtype: Any) -> str:
    """What `session.steps` does with microbatches, without a coordinator; returns a digest of everything."""
    rng = np.random.default_rng(5)
    x, t = torch.from_numpy(rng.standard_normal((N, 1, 12))).to(dtype), torch.from_numpy(rng.integers(0, 4, N))
    with _seeding, torch.random.fork_rng():
        torch.manual_seed(1)
        net = Net().to(dtype)
    ddp = paceline.torch.DDP(net, group, bucket_mb=1e-3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    sampler = paceline.ElasticSampler(N, global_batch=BATCH, microbatches=V)
    for _ in range(7):
        optimizer.zero_grad()
        for number in in_turn(group, V):
            indices, weight = sampler.current_microbatch(number)
            group._core.set_gradient_weight(weight)
            nn.functional.cross_entropy(ddp(x[indices]), t[indices]).backward()
        group._core.set_order(EVEN)
        ddp.clip_grad_norm(0.7)
        optimizer.step()
        sampler.advance(group.size)
    digest = hashlib.sha256()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    for tensor in [*net.state_dict().values(), *moments]:
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_world_trains_the_bits_of_one_process(dtype: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {world: set(run_ranks(world, lambda group: train(group, dtype), timeout=60)) for world in (1, 2, 3, 4)}
    finally:
        torch.set_num_threads(before)
    assert len(set.union(*found.values())) == 1, found


class Run:
    """One process that trains in microbatches."""

    def __init__(self, **settings: Any) -> None:
        self.session = paceline.join()
        self.net = Net()
        self.ddp = paceline.torch.DDP(self.net, self.session.group, **settings)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.sampler = paceline.ElasticSampler(N, global_batch=BATCH, microbatches=4)
        self.state = paceline.TrainState(model=self.ddp, optimizer=self.optimizer, sampler=self.sampler)

    def steps(self, inside: Any, total: int = 1) -> None:
        with self.session:
            for step in self.session.steps(self.state, total=total):
                with step:
                    self.optimizer.zero_grad()
                    inside(step)


def test_two_wrappers_may_share_one_loss() -> None:
    """Their backward passes overlap: torch ends that which began first before the other. Rank 1 has one microbatch."""

    def train(group: Group) -> bytes:
        x = torch.linspace(-1, 1, 18).reshape(6, 3)
        with _seeding, torch.random.fork_rng():
            torch.manual_seed(1)
            nets = [nn.Linear(3, 2) for _ in range(2)]
        first, second = (paceline.torch.DDP(net, group) for net in nets)
        first.prepare()
        second.prepare()
        for number in in_turn(group, 3):
            group._core.set_gradient_weight(1 / 3)
            samples = x[2 * number : 2 * number + 2]
            (first(samples).sum() + second(samples).square().mean()).backward()
            with pytest.raises(StepOrderError, match="a collective in microbatch"):
                group.all_reduce(np.ones(1))
        group._core.set_order(EVEN)
        gradients = [p.grad.numpy().tobytes() for net in nets for p in net.parameters()]
        return b"".join(gradients)

    found = [of for world in (1, 2, 3) for of in run_ranks(world, train)]
    assert len(set(found)) == 1


def test_random_numbers_are_seeded_per_microbatch() -> None:
    run, drawn = Run(), []

    def inside(step: Any) -> None:
        for micro in step.microbatches:
            with micro:
                drawn.append(torch.rand(1).item())
                run.ddp(torch.rand(3, 1, 12)).sum().backward()
        drawn.append(torch.rand(1).item())
        run.optimizer.step()

    run.steps(inside)
    first = list(drawn)
    drawn.clear()
    run = Run()
    run.steps(inside)
    assert drawn == first
    assert len(set(first)) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_samples_of_a_microbatch(workers: int) -> None:
    seen: list[int] = []

    def inside(step: Any) -> None:
        for micro in step.microbatches:
            with micro:
                (rows,) = loader.batch(micro)
                assert rows.tolist() == micro.indices.tolist()
                seen.extend(rows.tolist()[: micro.samples])
                run.ddp(torch.rand(len(rows), 1, 12)).sum().backward()
        run.optimizer.step()

    dataset = torch.utils.data.TensorDataset(torch.arange(N))
    with paceline.torch.ElasticDataLoader(dataset, num_workers=workers) as loader:  # before `join`, as its page says
        run = Run()
        run.steps(inside, total=5)
    assert len(seen) == N + BATCH
    assert sorted(seen[:N]) == list(range(N))


def test_a_loader_refuses_a_step_with_microbatches() -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(N))
    with (
        paceline.torch.ElasticDataLoader(dataset) as loader,
        pytest.raises(UnsupportedOp, match="would depend on the number of workers"),
    ):
        Run().steps(loader.batch)


def test_misuse_of_microbatches_is_refused() -> None:
    def once(step: Any, run: Run, x: Any) -> None:
        with step.microbatches[0]:
            run.ddp(x).sum().backward()

    x = torch.rand(3, 1, 12)
    run = Run()
    with pytest.raises(StepOrderError, match="belong to none of them"):
        run.steps(lambda step: run.ddp(x).sum().backward())

    def twice(step: Any) -> None:
        with step.microbatches[0]:
            run.ddp(x).sum().backward()
            run.ddp(x).sum().backward()

    run = Run()
    with pytest.raises(StepOrderError, match="a second backward pass in microbatch 0"):
        run.steps(twice)

    def bare(step: Any) -> None:
        first, second, *_ = step.microbatches
        with first:
            run.ddp(x).sum().backward()
        with second:
            run.net(x).sum().backward()

    run = Run()
    with pytest.raises(StepOrderError, match="did not go through the wrapper"):
        run.steps(bare)

    def zeros(step: Any) -> None:
        for parameter in run.net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        once(step, run, x)

    run = Run()
    with pytest.raises(StepOrderError, match=r"set gradients to None before the first microbatch"):
        run.steps(zeros)

    def waiting(step: Any) -> None:
        with step.microbatches[0]:
            run.session.barrier("here")

    run = Run()
    with pytest.raises(StepOrderError, match="a barrier in microbatch 0 of a step"):
        run.steps(waiting)

    def joined(step: Any) -> None:
        with step.microbatches[0], run.ddp.join():
            pass

    run = Run()
    with pytest.raises(StepOrderError, match=r"join\(\) in a step with microbatches"):
        run.steps(joined)
    run = Run(compression="bf16")
    with pytest.raises(UnsupportedOp, match="neither compression nor an engine keeps"):
        run.steps(lambda step: once(step, run, x))


class Rounds:
    """One process that trains rounds in microbatches."""

    def __init__(self, **settings: Any) -> None:
        self.session = paceline.join()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Linear(3, 2)
        self.inner = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.local = paceline.torch.LocalSGD(self.net, self.inner, self.session.group, **settings)
        sampler = paceline.ElasticSampler(N, global_batch=BATCH, microbatches=4)
        self.state = paceline.TrainState(model=self.local, sampler=sampler)

    def rounds(self, inside: Any) -> None:
        with self.session:
            for step in self.session.steps(self.state, total=1):
                with step:
                    inside(step)

    def train(self, micro: Any) -> None:
        with micro:
            for batch in self.local.replica_batches(micro, 2):
                self.net(torch.ones(len(batch), 3) * micro.number).square().sum().backward()
                self.inner.step()
                self.inner.zero_grad()


def test_a_round_is_the_weighted_mean_of_its_replicas() -> None:
    run = Rounds()
    ends = []

    def inside(step: Any) -> None:
        for micro in step.microbatches:
            run.train(micro)
            ends.append((run.net.weight.detach().clone(), micro.weight))
        run.local.outer_step()

    run.rounds(inside)
    mean = sum(end * share for end, share in ends)
    assert torch.allclose(run.net.weight, mean, rtol=1e-6)
    assert not torch.equal(ends[0][0], ends[1][0])


def test_a_replica_begins_without_leftover_gradients() -> None:
    """A script may have an inner step for every second batch."""

    def end_of_part_2(clears: bool) -> Any:
        run, ends = Rounds(), []

        def inside(step: Any) -> None:
            for micro in step.microbatches:
                if micro.number == 2 and clears:
                    run.inner.zero_grad()
                with micro:
                    for number, batch in enumerate(run.local.replica_batches(micro, 3)):
                        run.net(torch.ones(len(batch), 3) * (1 + micro.number)).square().sum().backward()
                        if number % 2:
                            run.inner.step()
                            run.inner.zero_grad()
                ends.append(run.net.weight.detach().clone())
            run.local.outer_step()

        run.rounds(inside)
        return ends[2]

    assert torch.equal(end_of_part_2(False), end_of_part_2(True))


def test_misuse_of_microbatches_in_rounds_is_refused() -> None:
    def scheduled(step: Any) -> None:
        with step.microbatches[0] as micro:
            for _ in run.local.replica_batches(micro, 2):
                run.inner.param_groups[0]["lr"] *= 0.5

    run = Rounds()
    with pytest.raises(StepOrderError, match="a setting of the inner optimizer, such as its learning rate, changed in"):
        run.rounds(scheduled)
    run = Rounds()
    with pytest.raises(UnsupportedOp, match="each has its own weight"):
        run.rounds(lambda step: run.local.outer_step(1.0))
    run = Rounds()
    with pytest.raises(StepOrderError, match="no wrapper has summed the microbatches of this step"):
        run.rounds(lambda step: run.local.outer_step())
    run = Rounds()
    with pytest.raises(StepOrderError, match="belongs inside of `with micro:`"):
        run.rounds(lambda step: next(run.local.replica_batches(step.microbatches[0], 2)))

    def broken_off(step: Any) -> None:
        for micro in step.microbatches:
            with micro:
                next(run.local.replica_batches(micro, 2))
        run.local.outer_step()

    run = Rounds()
    with pytest.raises(StepOrderError):
        run.rounds(broken_off)
    run = Rounds(compression="bf16")
    with pytest.raises(UnsupportedOp, match="neither compression nor an engine keeps"):
        run.rounds(lambda step: run.train(step.microbatches[0]))
