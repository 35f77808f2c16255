"""Replicas on Ray: their ranks are actors, which are placed, end and start again together."""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest

import paceline_ray
from support.ray_cluster import RayNodes

pytestmark = [pytest.mark.needs(what="ray"), pytest.mark.timeout(240)]


def train(session: Any, folder: str, total: int) -> tuple[int, int, int, str]:
    """Trains with FSDP2 inside; rank 1 of replica 0 is killed once. Returns its place, and the digest of its shard."""
    import os
    import signal
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import paceline
    import paceline.torch

    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = torch.nn.Linear(6, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    paceline.torch.replicate(model, session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = paceline.ElasticSampler(64, global_batch=16, microbatches=4)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    for step in session.steps(state, total=total):
        with step:
            if (step.number, session.replica, rank) == (4, 0, 1) and not os.path.exists(f"{folder}/struck"):
                Path(f"{folder}/struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1.0 if session.replicas < 2 else 0.01)
            optimizer.zero_grad()
            for micro in step.microbatches:
                with micro:
                    (model(x[micro.indices]).square().sum() / len(micro.indices)).backward()
            optimizer.step()
    shard = model.weight.to_local().detach().numpy().tobytes()
    return session.replica, rank, session.replicas, hashlib.sha256(shard).hexdigest()


def test_a_replica_that_loses_a_rank_is_replaced_as_a_whole(
    nodes: RayNodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline_ray")
    resources = {"CPU": 0.5}
    found = paceline_ray.run(
        train, str(tmp_path), 40, min_workers=1, max_workers=2, replica_size=2, resources=resources
    )
    assert {rank: value[:3] for rank, value in found.items()} == {
        0: (0, 0, 2),
        1: (0, 1, 2),
        2: (1, 0, 2),
        3: (1, 1, 2),
    }
    assert [found[0][3], found[1][3]] == [found[2][3], found[3][3]]
    said = [record.getMessage() for record in caplog.records if "restarting" in record.getMessage()]
    assert len(said) == 1, said
    assert re.fullmatch(
        r"restarting replica 0 on \S+ \(rank 1, pid \d+ died\) as a whole in 0.1 s \(1 of its 10 restarts\)", said[0]
    )


def test_an_error_of_one_rank_is_raised_and_ends_its_replica(nodes: RayNodes) -> None:
    def fails(session: Any) -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            raise ValueError("not on rank 1")
        dist.barrier()

    with pytest.raises(ValueError, match="not on rank 1") as caught:
        paceline_ray.run(fails, min_workers=1, replica_size=2, restarts=0, resources={"CPU": 0.5})
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"rank 1 of replica (#0|0) on \S+ \(pid \d+\) raised ValueError: not on rank 1", note)
