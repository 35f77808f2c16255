"""`paceline.run` with torch: workers are forked from a process that has computed with torch's threads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.command import script

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked"),
]

CELL = """
import torch, paceline, paceline.torch

torch.set_num_threads(2)
torch.manual_seed(0)
x = torch.randn(400, 8)
t = (x.sum(1) > 0).long()
big = torch.randn(500, 500, requires_grad=True)
(big @ big).sum().backward()  # so there are threads of torch's, of which the workers have none


def train(session, seed):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    model = paceline.torch.DDP(net, session.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = paceline.ElasticSampler(len(x), global_batch=40)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    losses = [float(torch.nn.functional.cross_entropy(net(x), t))]
    for step in session.steps(state, total=30):
        with step:
            loss = torch.nn.functional.cross_entropy(model(x[step.indices]), t[step.indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    losses.append(float(torch.nn.functional.cross_entropy(net(x), t)))
    return losses


alone, three = paceline.run(train, 1, n=1)[0], paceline.run(train, 1, n=3)[0]
assert three[1] < 0.7 * three[0]
assert max(abs(a - b) for a, b in zip(alone, three)) < 1e-5, (alone, three)
assert torch.get_num_threads() == 2
"""


def test_workers_compute_what_one_does_after_the_notebook_has_computed(tmp_path: Path) -> None:
    path = tmp_path / "cell.py"
    path.write_text(CELL)
    with script(path, TMPDIR=str(tmp_path)) as process:
        assert process.wait() == 0, str(process)
