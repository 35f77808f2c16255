"""A pipeline inside replicas, in microbatches: the same bits for one and two replicas, also when one dies."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from support.command import command

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

SCRIPT = str(Path(__file__).parent / "replica_pipeline.py")
TOTAL = 6


def train(replicas: int, *arguments: object) -> str:
    """Trains in replicas of two stages, all of which come back if one is struck; returns what all ranks said."""
    bounds = ("-n", str(2 * replicas), "--replica-size", "2", "--min", str(replicas), "--restarts", "1")
    with command("run", *bounds, SCRIPT, str(TOTAL), *map(str, arguments)) as run:
        assert run.wait(150.0) == 0, str(run)
    return run.stdout


def stages(replicas: int, said: str) -> dict[str, tuple[str, list[float]]]:
    """For each stage the digest of its state, which is the same in all replicas, and its first weights."""
    found = re.findall(rf"{replicas} replicas, stage (\d): (\w+) (\[.*\])", said)
    assert len(found) == 2 * replicas, said
    assert len({(stage, digest) for stage, digest, _ in found}) == 2, said
    return {stage: (digest, ast.literal_eval(weights)) for stage, digest, weights in found}


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[str, list[float]]]:
    """The digests and weights of one replica that loses nobody."""
    return stages(1, train(1))


def test_a_pipeline_trains_as_one_process_does(undisturbed: dict[str, tuple[str, list[float]]]) -> None:
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(8, 15), torch.nn.ReLU())
    model = torch.nn.Sequential(first, torch.nn.Sequential(torch.nn.BatchNorm1d(15), torch.nn.Linear(15, 1)))
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    sampler = paceline.ElasticSampler(64, global_batch=16, microbatches=4)
    for _ in range(TOTAL):
        optimizer.zero_grad()
        for number in range(4):
            for half in np.split(sampler.current_microbatch(number)[0], 2):
                (torch.nn.functional.mse_loss(model(x[half]), t[half]) / 8).backward()
        optimizer.step()
        sampler.advance(1)
    for stage, part in zip("01", model, strict=True):
        expected = next(part.parameters()).detach().reshape(-1)[:4]
        np.testing.assert_allclose(undisturbed[stage][1], expected, rtol=1e-3)


def test_two_replicas_end_with_the_bits_of_one_though_a_rank_is_killed_between_two_microbatches(
    undisturbed: dict[str, tuple[str, list[float]]], tmp_path: Path
) -> None:
    struck = tmp_path / "struck"
    assert stages(2, train(2, 3, struck)) == undisturbed
    assert struck.exists()


@pytest.mark.exhaustive  # the test with a kill shows it too
def test_two_replicas_end_with_the_bits_of_one(undisturbed: dict[str, tuple[str, list[float]]]) -> None:
    assert stages(2, train(2)) == undisturbed
