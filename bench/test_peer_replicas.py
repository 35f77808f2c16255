"""Measures what replicas cost: a step beside torch's own HSDP over Gloo, a killed rank, and a replica that comes back.

`replicas.py` measures the last two beside torchft.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from pytorch.torch_ranks import torch_ranks

from figures import NOISE, at_most
from paceline.testing import coordinator
from replica_jobs import RANKS
from replicas import SIZES, Result, measure
from support.peers import need_peers

pytestmark = [pytest.mark.needs(what="peers"), pytest.mark.timeout(300)]

ROUNDS = 40

STEPS = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import paceline.torch
from torch.distributed.device_mesh import init_device_mesh
from replica_contenders import loss_of, sharded

meshes = init_device_mesh("cpu", (2, {RANKS}), mesh_dim_names=("replicate", "shard"))
position = meshes["shard"].get_local_rank()
models = {{"replicate": sharded(*SIZE, meshes["shard"]), "HSDP": sharded(*SIZE, meshes)}}
optimizers = {{way: torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for way, model in models.items()}}
times = {{way: [] for way in models}}

def clocks():
    return time.perf_counter(), time.process_time()

def train(way, indices):
    mine = indices[position::{RANKS}].tolist()
    optimizers[way].zero_grad()
    (loss_of(models[way], mine) * {RANKS} / len(indices)).backward()
    optimizers[way].step()

def note(way, began):
    times[way].append([now - before for now, before in zip(clocks(), began)])
    dist.barrier()

with paceline.join(replica=meshes["shard"].get_group()) as session:
    paceline.torch.replicate(models["replicate"], session)
    state = paceline.TrainState(
        model=models["replicate"], optimizer=optimizers["replicate"], sampler=paceline.ElasticSampler(4096, 12)
    )
    began = clocks()
    for step in session.steps(state, total={ROUNDS} + 10):
        with step:
            train("replicate", step.indices)
        note("replicate", began)
        began = clocks()
        train("HSDP", step.indices)
        note("HSDP", began)
        began = clocks()
for way in times:
    del times[way][:10]  # the first steps also check the state
emit("facts", times=times)
"""


@pytest.mark.parametrize("megabytes", SIZES)
def test_a_step_of_replicas_takes_no_longer_than_one_of_hsdp_over_gloo(megabytes: int) -> None:
    """Two replicas of two ranks; ours is a whole step of `session.steps`, which could be undone."""
    need_peers()
    with (
        coordinator() as address,
        torch_ranks(
            4,
            STEPS.replace("SIZE", str(SIZES[megabytes])),
            BACKEND="gloo",
            PACELINE_COORDINATOR=address,
            PACELINE_MIN_WORKERS="2",
        ) as started,
    ):
        ranks: list[Any] = [worker.expect("facts", timeout=240.0)["times"] for worker in started]
    times = {  # of each step: the slowest rank's by the wall clock, and CPU time of all
        way: [
            (max(wall for wall, _ in step), sum(cpu for _, cpu in step))
            for step in zip(*(rank[way] for rank in ranks), strict=True)
        ]
        for way in ranks[0]
    }
    print(f"\n{megabytes} MB of state:")
    for way, found in times.items():
        wall, cpu = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
        print(f"  {way:<10} {wall:6.1f} ms  CPU {cpu:6.1f} ms")
    ratios = [
        statistics.median(a[n] / b[n] for a, b in zip(times["replicate"], times["HSDP"], strict=True)) for n in (0, 1)
    ]
    print(f"  {ratios[0]:.2f} times HSDP by the wall clock, {ratios[1]:.2f} of CPU time")
    assert min(ratios) <= 1.0 * NOISE


def test_the_other_replicas_go_on_soon_after_a_kill() -> None:
    """Three replicas of two ranks, of which one rank is killed at a random moment, 8 times."""
    need_peers()
    result = Result("paceline")
    measure(result, 8, SIZES[10], random.Random(0))
    p50, p90 = statistics.median(result.recovered), result.p90(result.recovered)
    print(f"\nSIGKILL to the next committed step: p50 {1e3 * p50:.0f} ms, p90 {1e3 * p90:.0f} ms")
    assert p50 <= at_most(0.3)
    assert (result.lost, result.twice) == (0, 0)
    assert max(result.failed) <= 1, "at most one step is repeated for each kill"


def test_a_replica_that_comes_back_trains_soon_after_its_ranks_are_ready() -> None:
    """With 100 MB of state, 4 times."""
    need_peers()
    result = Result("paceline")
    measure(result, 4, SIZES[100], random.Random(0))
    p50 = statistics.median(result.back)
    print(f"\nranks ready to the replica's first step: p50 {1e3 * p50:.0f} ms, longest {1e3 * max(result.back):.0f} ms")
    assert p50 <= at_most(1.8)
