"""The main job on real digits over gRPC: one worker and four reach the same weights; all four the same bits (I5)."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from paceline.testing import coordinator
from support.processes import workers

TRAIN = """
import base64, hashlib
from sklearn.datasets import load_digits
from paceline import nn

dtype = np.dtype(os.environ["DTYPE"])
digits = load_digits()
x, t = (digits.data / 16).astype(dtype), digits.target
with paceline.join() as session:
    rng = np.random.default_rng(1 + session.rank)          # unlike weights: rank 0's must win
    model = nn.Sequential(nn.Linear(64, 48, rng=rng, dtype=dtype), nn.ReLU(), nn.Linear(48, 10, rng=rng, dtype=dtype))
    ddp = paceline.DDP(model, session.group, bucket_mb=0.01)   # several buckets, so that their order matters
    optimizer = paceline.optim.SGD(ddp, lr=0.1, momentum=0.9)
    sampler = paceline.ElasticSampler(len(x), global_batch=157, seed=0)     # shares of 39, 39, 39 and 40
    for step in range(60):
        indices, weight = sampler.share(step, session.rank, session.size)
        loss, dy = nn.softmax_cross_entropy(ddp(x[indices]), t[indices])
        optimizer.zero_grad()
        ddp.backward(dy, weight)
        optimizer.step()
    flat = np.concatenate([parameter.data.ravel() for _, parameter in ddp.named_parameters()])
    emit("weights", data=base64.b64encode(flat.tobytes()).decode())
"""


def train(world: int, dtype: str) -> list[bytes]:
    with coordinator() as address:
        environment: dict[str, Any] = {"COORDINATOR": address, "MIN_WORKERS": str(world)}
        code = f"import os\nos.environ['DTYPE'] = {dtype!r}\n{TRAIN}"
        with workers(world, code, **environment) as started:
            found = [base64.b64decode(worker.expect("weights", timeout=50.0)["data"]) for worker in started]
            assert [worker.wait() for worker in started] == [0] * world
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [pytest.param("float32", 1e-4, marks=pytest.mark.exhaustive), ("float64", 1e-9)]
)
def test_one_and_four_workers_reach_the_same_weights(dtype: str, tolerance: float) -> None:
    (alone,) = train(1, dtype)
    four = train(4, dtype)
    assert len(set(four)) == 1
    np.testing.assert_allclose(
        np.frombuffer(four[0], dtype), np.frombuffer(alone, dtype), rtol=tolerance, atol=tolerance
    )
