"""LocalSGD: the mean of parameters after rounds of each worker alone, in a fixed world and in one that changes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch.local_training.line import SEED, TRAINER, check, check_bits
from pytorch.local_training.problem import Part, Reference, build, flat, inner_step, make_inner

import paceline
from paceline.testing import run_ranks
from paceline.torch import LocalSGD
from support.elastic.cluster import cluster
from support.elastic.faults import kill

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(180)]  # each process takes seconds to import torch

ROUNDS = 4


def batches_of(rank: int, number: int, steps: int) -> list[Any]:
    """Samples of a rank in a round: 3 to 5 for each inner step."""
    rng = np.random.default_rng([rank, number])
    return [rng.integers(0, 45, 3 + rank).tolist() for _ in range(steps)]


def test_one_worker_trains_the_bits_of_plain_training() -> None:
    def with_buffers() -> tuple[Any, Any]:
        net = build(SEED, torch.float32)
        net.insert(1, torch.nn.BatchNorm1d(16))
        return net, make_inner(net)

    plain, inner = with_buffers()
    for number in range(ROUNDS):
        for batch in batches_of(1, number, 5):
            inner_step(plain, inner, batch)

    def rank(group: Any) -> Any:
        net, inner = with_buffers()
        local = LocalSGD(net, inner, group)
        for number in range(ROUNDS):
            for batch in batches_of(1, number, 5):
                inner_step(net, inner, batch)
            local.outer_step()
        return net.state_dict()

    (found,) = run_ranks(1, rank)
    for path, value in plain.state_dict().items():
        assert torch.equal(found[path], value), path


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, 0.125, 2.0], [1.0, 0.0, 3.0]])
def test_three_ranks_match_the_reference_of_one_process(weights: list[float]) -> None:
    def rank(group: Any) -> Any:
        net = build(SEED if group.rank == 0 else 99)  # rank 0's values count
        inner = make_inner(net)
        local = LocalSGD(net, inner, group)
        local.prepare()
        for number in range(ROUNDS):
            for batch in batches_of(group.rank, number, 4):
                inner_step(net, inner, batch)
            local.outer_step(weights[group.rank])
        return flat(net)

    reference = Reference(SEED)
    for number in range(ROUNDS):
        reference.round([Part(r, batches_of(r, number, 4), weight) for r, weight in enumerate(weights)])
    check_against(run_ranks(3, rank), reference)


def test_ranks_are_weighted_by_their_inner_steps() -> None:
    def rank(group: Any) -> Any:
        net = build(SEED)
        inner = make_inner(net)
        local = LocalSGD(net, inner, group)
        for number in range(ROUNDS):
            for batch in batches_of(group.rank, number, 1 + group.rank):
                inner_step(net, inner, batch)
            local.outer_step()
        return flat(net)

    reference = Reference(SEED)
    for number in range(ROUNDS):
        reference.round([Part(r, batches_of(r, number, 1 + r), 1 + r) for r in range(3)])
    check_against(run_ranks(3, rank), reference)


def check_against(found: Sequence[Any], reference: Reference) -> None:
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    np.testing.assert_allclose(found[0], reference.parameters, rtol=1e-10, atol=1e-13)


def test_two_inner_optimizers_with_tied_and_frozen_parameters() -> None:
    def rank(group: Any) -> Any:
        net = build(SEED, torch.float32)
        net.append(torch.nn.BatchNorm1d(3))
        net.append(torch.nn.Linear(3, 3, bias=False))
        net.append(net[4])
        net[0].bias.requires_grad_(False)
        net[4].weight.data.copy_(torch.eye(3))
        first = torch.optim.SGD(net[0].parameters(), lr=0.1)
        second = torch.optim.SGD(net[1:].parameters(), lr=0.1)
        local = LocalSGD(net, [first, second], group)
        local.prepare()
        state = paceline.TrainState(model=local)
        state._core.check_round_trip()
        for _ in range(2):
            for batch in batches_of(group.rank, 0, 3):
                net(torch.ones(4, 6) * len(batch)).sum().backward()
                for inner in (first, second):
                    inner.step()
                    inner.zero_grad()
            local.outer_step()
        return {path: value.clone() for path, value in net.state_dict().items()}, state.fingerprint()

    (found, fingerprint), (other, others) = run_ranks(2, rank)
    assert fingerprint == others
    for path, value in found.items():
        assert torch.equal(other[path], value), path
    assert found["3.num_batches_tracked"] == 6
    assert torch.equal(found["0.bias"], build(SEED, torch.float32)[0].bias)


@pytest.mark.parametrize("compression", [None, "int8"])
def test_bfloat16_parameters_are_averaged_in_float32(compression: str | None) -> None:
    def rank(group: Any) -> Any:
        net = torch.nn.Linear(4, 1, bias=False).to(torch.bfloat16)
        torch.nn.init.ones_(net.weight)
        inner = torch.optim.SGD(net.parameters(), lr=1.0)
        local = LocalSGD(net, inner, group, compression=compression)
        net.weight.grad = torch.full_like(net.weight, -(2.0**-7) * group.rank)
        inner.step()
        local.outer_step()
        kept = paceline.TrainState(model=local).state_dict()["parts"]["model"]["arrays"]["model/weight"].copy()
        local.outer_step(1.0)  # nothing was learned: what the net has rounded away is no change
        again = paceline.TrainState(model=local).state_dict()["parts"]["model"]["arrays"]["model/weight"]
        return kept, again, net.weight.detach().float().numpy()

    for kept, again, net in run_ranks(2, rank):
        assert kept.dtype == np.float32
        np.testing.assert_allclose(kept, 1 + 2.0**-8, rtol=1e-4)  # half way between two numbers of the net
        np.testing.assert_allclose(again, kept, rtol=1e-4)
        np.testing.assert_array_equal(net, 1)


def test_misuse_is_refused() -> None:
    def rank(group: Any) -> None:
        net = build(SEED + group.rank)
        inner = make_inner(net)
        local = LocalSGD(net, inner, group)
        inner_step(net, inner, [0, 1])
        with pytest.raises(paceline.StepOrderError, match="after 1 inner steps"):
            local.prepare()
        with pytest.raises(paceline.StepOrderError, match=r"differ from rank 0's: .* prepare\(\)"):
            local.outer_step()

    run_ranks(2, rank)

    def alone(group: Any) -> None:
        net = build(SEED)
        inner = make_inner(net)
        local = LocalSGD(net, inner, group)
        with pytest.raises(paceline.StepOrderError, match="add up to 0"):
            local.outer_step()  # no inner step was made
        net[0].bias.requires_grad_(False)
        with pytest.raises(paceline.UnsupportedOp, match=r"'0.bias' has been frozen"):
            local.outer_step(1.0)
        with pytest.raises(ValueError, match="at least one inner step"):
            list(local.batches(np.arange(3), 0))
        with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
            LocalSGD(net, net.parameters(), group)
        with pytest.raises(paceline.UnsupportedOp, match="complex64"):
            LocalSGD(torch.nn.Linear(2, 2, dtype=torch.complex64), inner, group)

    run_ranks(1, alone)


@pytest.mark.parametrize(("samples", "steps", "sizes"), [(7, 3, [3, 2, 2]), (2, 3, [1, 1]), (1, 4, [1]), (8, 1, [8])])
def test_batches_splits_a_round_into_inner_steps(samples: int, steps: int, sizes: list[int]) -> None:
    found = list(LocalSGD.batches(np.arange(samples), steps))
    assert [len(batch) for batch in found] == sizes
    assert np.concatenate(found).tolist() == list(range(samples))


# In real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["mid_round", pytest.param("behind_gate", marks=pytest.mark.exhaustive)])
def test_a_killed_worker_costs_at_most_one_round(phase: str, tmp_path: Path) -> None:
    with cluster(tmp_path, total=6, method="LocalSGD", trainer=TRAINER, inner_steps=3) as c:
        c.start(3, [kill(at=phase, rank=1, step=3)])
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        check(c, lr=1.0, momentum=0.0)
        assert sum(c.redone().values()) <= 1, f"more than one round was redone\n{c}"


@pytest.mark.slow
def test_survivors_stop_a_lost_round_early(tmp_path: Path) -> None:
    with cluster(tmp_path, total=4, method="LocalSGD", trainer=TRAINER, inner_steps=4, pace=0.2) as c:
        c.start(3, [kill(at="mid_round", rank=1, step=2)])
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        check(c, lr=1.0, momentum=0.0)
        lost = [event for trainer in c.trainers for event in trainer.of("undone")]
        assert len(lost) == 2, str(c)
        assert all(event["made"] < 4 for event in lost), f"they went on to the end for nothing\n{c}"


@pytest.mark.slow
def test_joins_and_a_drain_redo_no_round(tmp_path: Path) -> None:
    with cluster(tmp_path, total=40, method="LocalSGD", trainer=TRAINER, inner_steps=3, pace=0.03) as c:
        (first,) = c.start(1, wait_at=2)
        c.wait_for_step(2)
        newcomers = c.start(2)
        first.go()
        c.wait_until(lambda: all(t.of("applied") for t in newcomers), "the newcomers train")
        first.signal(signal.SIGTERM)
        assert first.process.wait(30) == 0, str(c)
        assert first.of("dismissed"), str(c)
        assert set(c.wait().values()) == {0}, str(c)
        check(c, lr=1.0, momentum=0.0)
        assert not c.redone(), f"nobody failed, so nothing is redone\n{c}"


@pytest.mark.exhaustive
def test_int8_training_survives_a_kill(tmp_path: Path) -> None:
    with cluster(tmp_path, total=6, method="LocalSGD", trainer=TRAINER, inner_steps=3, compression="int8") as c:
        c.start(3, [kill(at="mid_round", rank=0, step=3)])
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        check_bits(c)
