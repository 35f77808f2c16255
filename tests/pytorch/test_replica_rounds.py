"""LocalSGD and DiLoCo between replicas: FSDP2 or TP inside them, inner steps that mates leave together, and deaths."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from paceline.testing import run_ranks
from support.command import command, wait_until_gone

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl"),
]

SCRIPT = Path(__file__).parent / "replica_rounds.py"
NEVER = ("never", 0, 0)
TOTAL = 10


def train(replicas: int, method: str, optimizer: str, inside: str, micro: int, *struck: object) -> tuple[str, str]:
    """Runs replicas of two ranks, of which one comes back; returns what their ranks and the launcher said."""
    bounds = ("-n", str(2 * replicas), "--replica-size", "2", "--restarts", "1", "--min", str(replicas))
    arguments = (method, optimizer, inside, micro, TOTAL, *struck)
    with command("run", *bounds, str(SCRIPT), *map(str, arguments)) as run:
        assert run.wait(150.0) == 0, str(run)
    wait_until_gone([int(pid) for pid in re.findall(r"pid (\d+)", run.stdout + run.complaints)])
    return run.stdout, run.complaints


def digests(said: str, ranks: int) -> str:
    """The digest of the parameters, which all ranks that came to the end print; the state of a position has one too."""
    found = re.findall(r"rank (\d) of \d/\d: (\w+) (\w+)", said)
    assert len(found) == ranks, said
    (digest,) = {whole for _, whole, _ in found}
    assert len({(rank, state) for rank, _, state in found}) == 2, said
    return digest


def plain_members(method: str, optimizer: str) -> list[float]:
    """The first parameters that two plain members find with the same data, here."""

    def built() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()

    nets = [built() for _ in range(2)]  # each rank is a thread
    x, t = torch.randn(48, 6).double(), torch.randn(48, 3).double()

    def rank(group: paceline.Group) -> list[float]:
        net = nets[group.rank]
        inner = getattr(torch.optim, optimizer)(net.parameters(), lr=0.02)
        local = getattr(paceline.torch, method)(net, inner, group)
        sampler = paceline.ElasticSampler(48, 24)
        for _ in range(TOTAL):
            indices, weight = sampler.current(group.rank, group.size)
            for batch in local.batches(indices, 3):
                (((net(x[batch]) - t[batch]) ** 2).sum() / len(batch)).backward()
                inner.step()
                inner.zero_grad()
            local.outer_step(weight)
            sampler.advance(group.size)
        return next(net.parameters()).detach().reshape(-1)[:4].tolist()  # type: ignore[no-any-return]

    return run_ranks(2, rank)[0]


@pytest.mark.parametrize(
    ("method", "optimizer", "inside", "struck"),
    [
        ("DiLoCo", "SGD", "fsdp", ("inner", 1, 4)),
        pytest.param("LocalSGD", "SGD", "tp", ("before the gate", 0, 4), marks=pytest.mark.exhaustive),
        pytest.param("DiLoCo", "SGD", "tp", ("behind the gate", 0, 4), marks=pytest.mark.exhaustive),
        pytest.param("LocalSGD", "SGD", "tp", ("inner", 0, 4), marks=pytest.mark.exhaustive),
        pytest.param("LocalSGD", "AdamW", "fsdp", NEVER, marks=pytest.mark.exhaustive),
        pytest.param("DiLoCo", "AdamW", "tp", NEVER, marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_find_what_plain_members_find_though_one_is_killed_and_comes_back(
    method: str, optimizer: str, inside: str, struck: tuple[str, int, int], tmp_path: Path
) -> None:
    """Mates leave a round that will be undone at the same inner step, each outer step is made once."""
    stdout, complaints = train(2, method, optimizer, inside, 0, *struck, tmp_path / "struck")
    assert complaints.count("as a whole") == (struck != NEVER), complaints
    digests(stdout, 4)
    if struck[0] == "inner":
        assert len(set(re.findall(r"short (\[\d\])", stdout))) == 1, stdout
    found = ast.literal_eval(re.findall(r"found (\[.*\])", stdout)[0])
    np.testing.assert_allclose(found, plain_members(method, optimizer), rtol=1e-9)


@pytest.mark.parametrize(
    ("method", "inside", "instant"),
    [
        ("LocalSGD", "tp", "behind the inner steps"),  # the lane of the mate has its sums then
        *(
            pytest.param("DiLoCo", "fsdp", instant, marks=pytest.mark.exhaustive)
            for instant in ("inner", "behind the inner steps", "before the gate", "behind the gate")
        ),
    ],
)
def test_microbatches_give_the_bits_of_one_replica_though_one_of_two_is_killed(
    method: str, inside: str, instant: str, tmp_path: Path
) -> None:
    alone, _ = train(1, method, "AdamW", inside, 4, *NEVER, "-")
    stdout, _ = train(2, method, "AdamW", inside, 4, instant, 1, 4, tmp_path / "struck")
    assert digests(stdout, 4) == digests(alone, 2), stdout
