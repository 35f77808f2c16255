"""DiLoCo: an outer step with momentum on what rounds of local training have changed; few bits; few bytes; elastic."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch.local_training.line import SEED, TRAINER, check
from pytorch.local_training.problem import Part, Reference, build, flat, inner_step, make_inner

import paceline
from paceline.testing import run_ranks
from paceline.torch import DiLoCo
from support.elastic.cluster import cluster
from support.elastic.faults import kill

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(180)]  # each process takes seconds to import torch

DILOCO = {"lr": 0.7, "momentum": 0.9}


def batches_of(rank: int, number: int, steps: int = 4) -> list[Any]:
    """Samples of a rank in a round."""
    rng = np.random.default_rng([rank, number])
    return [rng.integers(0, 45, 3 + rank).tolist() for _ in range(steps)]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.0)])
def test_ranks_match_the_reference_of_one_process(world: int, lr: float, momentum: float) -> None:
    weights = [0.5, 0.125, 2.0][:world]

    def rank(group: Any) -> Any:
        net = build(SEED)
        inner = make_inner(net)
        local = DiLoCo(net, inner, group, outer_lr=lr, outer_momentum=momentum)
        for number in range(4):
            for batch in batches_of(group.rank, number):
                inner_step(net, inner, batch)
            local.outer_step(weights[group.rank])
        return flat(net)

    reference = Reference(SEED, lr, momentum)
    for number in range(4):
        reference.round([Part(r, batches_of(r, number), weight) for r, weight in enumerate(weights)])
    found = run_ranks(world, rank)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    np.testing.assert_allclose(found[0], reference.parameters, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("compression", "share"), [("int8", 1 / 126), ("bf16", 1 / 127)])
def test_compressed_rounds_are_close_to_exact_and_equal_on_all_ranks(compression: str, share: float) -> None:
    def rank(group: Any, compression: str | None) -> tuple[Any, Any, float]:
        net = build(SEED, torch.float32)
        inner = make_inner(net)
        local = DiLoCo(net, inner, group, compression=compression)
        after = []
        change = 0.0
        for number in range(3):
            before = flat(net)
            for batch in batches_of(group.rank, number):
                inner_step(net, inner, batch)
            change = max(change, float(np.abs(flat(net) - before).max()))
            local.outer_step(1.0)
            after.append(flat(net))
        return after[0], after[-1], change

    exact = run_ranks(3, lambda group: rank(group, None))
    near = run_ranks(3, lambda group: rank(group, compression))
    for _, last, _ in near[1:]:
        np.testing.assert_array_equal(last, near[0][1])
    # One round: at most that share of the ranks' largest changes in the sum, a third of it in the mean; then the step.
    limit = share * sum(change for *_, change in near) / 3 * 0.7 * 1.9
    assert 0 < np.abs(near[0][0] - exact[0][0]).max() <= limit * 1.001


class Door:
    """A gate that can be shut."""

    has_mates = False

    def __init__(self) -> None:
        self.shut = False

    def open(self, optimizer: object) -> None:
        if self.shut:
            raise paceline.PeerLost("the round is lost")

    def check(self) -> None:
        """See `paceline._elastic.state.Gate`."""

    def spoil(self) -> None:
        raise AssertionError("nothing was to change")

    def changed(self) -> None:
        """See `paceline._elastic.state.Gate`."""


@pytest.mark.parametrize("restore_inner", [True, False])
def test_an_undone_round_is_restored(restore_inner: bool) -> None:
    """Not even in what rounding left over, the inner optimizer, a schedule or buffers."""

    def rank(group: Any, lost: bool) -> Any:
        net = build(SEED, torch.float32)
        net.append(torch.nn.BatchNorm1d(3))
        inner = make_inner(net)
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
        local = DiLoCo(net, inner, group, compression="int8", restore_inner=restore_inner)
        local.prepare()
        state = paceline.TrainState(model=local, schedule=schedule)
        state._core.check_round_trip()
        door = Door()
        state._core.guard(door)
        for number in [0, 1, 1, 2] if lost else [0, 1, 2]:
            door.shut = lost and number == 1 and not door.shut
            begun, small = flat(net), state._core.small()
            for batch in batches_of(group.rank, number):
                inner_step(net, inner, batch)
                schedule.step()
            if door.shut:
                with pytest.raises(paceline.PeerLost):
                    local.outer_step()
                assert not np.array_equal(flat(net), begun)
                state._core.undo(small)
                np.testing.assert_array_equal(flat(net), begun)
                assert all(parameter.grad is None for parameter in net.parameters())
                number_of = {float(kept["step"]) for kept in inner.state.values()}
                assert number_of == ({4.0} if restore_inner else {8.0})
            else:
                local.outer_step()
        state._core.unguard()
        return flat(net), state.fingerprint(), inner.param_groups[0]["lr"]

    undisturbed = run_ranks(3, lambda group: rank(group, False))
    disturbed = run_ranks(3, lambda group: rank(group, True))
    assert len({fingerprint for _, fingerprint, _ in disturbed}) == 1
    assert [lr for *_, lr in disturbed] == [lr for *_, lr in undisturbed]
    same = np.array_equal(disturbed[0][0], undisturbed[0][0])
    assert same == restore_inner, "what an undone round taught the inner optimizer"


def test_a_newcomer_loads_the_state() -> None:
    def trained(group: Any) -> Any:
        net = build(SEED)
        inner = make_inner(net)
        local = DiLoCo(net, inner, group)
        for batch in batches_of(0, 0):
            inner_step(net, inner, batch)
        inner.param_groups[0]["lr"] = 0.005
        local.outer_step()
        local.outer_optimizer.lr = 0.5
        return net, inner, local, paceline.TrainState(model=local)

    def rank(group: Any) -> None:
        net, _, _, state = trained(group)
        newcomer = build(99)
        inner = make_inner(newcomer)
        local = DiLoCo(newcomer, inner, group)
        taken = paceline.TrainState(model=local)
        assert taken._core.manifest() == state._core.manifest()
        taken.load_state_dict(state.state_dict())
        assert taken.fingerprint() == state.fingerprint()
        np.testing.assert_array_equal(flat(newcomer), flat(net))
        assert inner.param_groups[0]["lr"] == 0.005
        assert not inner.state, "the inner optimizer's state is the worker's own"
        assert local.outer_optimizer.lr == 0.5

    run_ranks(1, rank)


@pytest.mark.slow
def test_twenty_times_fewer_bytes_reach_the_same_loss() -> None:
    """Beside data-parallel training with the same optimizer on the same samples."""
    (x, t), (x_held_out, t_held_out) = _clouds(20_000, seed=1), _clouds(2_000, seed=2)
    every, rounds, world, batch = 20, 45, 3, 16
    torch.set_num_threads(1)

    def rank(group: Any, method: str) -> tuple[float, int]:
        rng = np.random.default_rng(group.rank)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        with torch.no_grad():
            for parameter, seed in zip(net.parameters(), range(4), strict=True):
                values = np.random.default_rng(seed).standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(values / 10))
        inner = torch.optim.AdamW(net.parameters(), lr=5e-4)
        compression = "int8" if method == "int8" else None
        local = DiLoCo(net, inner, group, compression=compression)
        local.prepare()
        before = group.bytes_sent
        for step in range(every * rounds):
            some = rng.integers(0, len(x), batch)
            torch.nn.functional.cross_entropy(net(x[some]), t[some]).backward()
            if method == "synchronous":
                gradients = [parameter.grad.numpy() for parameter in net.parameters()]
                flat = np.concatenate([gradient.reshape(-1) for gradient in gradients])
                group.all_reduce(flat, op="mean", out=flat)
                ends = np.cumsum([gradient.size for gradient in gradients])
                for gradient, end in zip(gradients, ends, strict=True):
                    gradient[...] = flat[end - gradient.size : end].reshape(gradient.shape)
            inner.step()
            inner.zero_grad()
            if method != "synchronous" and (step + 1) % every == 0:
                local.outer_step()
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(net(x_held_out), t_held_out)
        return float(loss), group.bytes_sent - before

    found = {method: run_ranks(world, lambda group, m=method: rank(group, m)) for method in _METHODS}
    losses = {method: results[0][0] for method, results in found.items()}
    sent = {method: sum(count for _, count in results) for method, results in found.items()}
    assert losses["DiLoCo"] <= losses["synchronous"] + 0.03
    assert losses["int8"] <= losses["DiLoCo"] + 0.01
    assert sent["synchronous"] > 19.5 * sent["DiLoCo"], "the weight and a few flags travel too"
    assert sent["DiLoCo"] > 3.5 * sent["int8"]


_METHODS = ("synchronous", "DiLoCo", "int8")


def _clouds(count: int, seed: int) -> tuple[Any, Any]:
    """Samples of ten classes that overlap: inputs of 64 features, and labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    inputs = np.random.default_rng(0).standard_normal((10, 64))[labels] + 3 * rng.standard_normal((count, 64))
    return torch.from_numpy(inputs.astype(np.float32)), torch.from_numpy(labels)


# In real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(("phase", "world"), [("late_all_reduce", 4), ("in_update", 3)])
def test_a_killed_worker_costs_at_most_one_round(phase: str, world: int, tmp_path: Path) -> None:
    """Rank 0 is the one: in the round, in the outer step, and when the round counts already."""
    with cluster(tmp_path, total=6, method="DiLoCo", trainer=TRAINER, inner_steps=3) as c:
        c.start(world, [kill(at=phase, rank=0, step=3)])
        assert sorted(c.wait().values()) == [-9, *[0] * (world - 1)], str(c)
        check(c, **DILOCO)
        assert sum(c.redone().values()) <= 1, f"more than one round was redone\n{c}"


@pytest.mark.slow
def test_training_survives_joins_a_drain_and_a_kill(tmp_path: Path) -> None:
    with cluster(tmp_path, total=60, method="DiLoCo", trainer=TRAINER, inner_steps=3, pace=0.03) as c:
        first, second = c.start(2, wait_at=3)
        c.wait_for_step(3)
        newcomers = c.start(2)
        first.go()
        second.go()
        c.wait_until(lambda: all(t.of("applied") for t in newcomers), "the newcomers train")
        first.signal(signal.SIGTERM)
        assert first.process.wait(30) == 0, str(c)
        second.signal(signal.SIGKILL)
        assert sorted(c.wait().values()) == [-9, 0, 0, 0], str(c)
        check(c, **DILOCO)


@pytest.mark.exhaustive
def test_new_workers_resume_from_a_checkpoint(tmp_path: Path) -> None:
    """A drain of all writes one; the inner optimizers begin anew."""
    where = str(tmp_path / "checkpoints")
    with cluster(tmp_path, least=2, total=30, method="DiLoCo", trainer=TRAINER, inner_steps=3, pace=0.03,
                 checkpoint_dir=where) as c:  # fmt: skip
        c.start(2)
        c.wait_for_step(3)
        for trainer in c.trainers:
            trainer.signal(signal.SIGTERM)
        for trainer in c.trainers:
            assert trainer.process.wait(30) == 0, str(c)
        last = max(t.of("dismissed")[0]["step"] for t in c.trainers)
        c.start(2, pace=0)
        assert set(c.wait().values()) == {0}, str(c)
        assert min(e["step"] for t in c.trainers[2:] for e in t.of("applied")) == last + 1, str(c)
        check(c, **DILOCO)
