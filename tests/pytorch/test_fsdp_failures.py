"""A worker dies or raises in a pass of a torch model: all others raise one typed error, and keep no memory."""

from __future__ import annotations

import pytest
from pytorch.fake_device import ON_DEVICE

from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.needs(what="torch")

CODE = """
import torch
from torch import nn
from paceline.torch import FSDP
from paceline import ShardingStrategy

torch.set_num_threads(1)

class Watched(nn.Linear):
    '''A layer that calls `act()` when it runs.'''
    def forward(self, x):
        if WHERE == "forward" and self is layers[2]:
            act()
        y = super().forward(x)
        if WHERE == "backward" and self is layers[2]:
            y.register_hook(lambda gradient: act())
        return y

def act():
    if step == 3 and session.rank == 1:
        END

with paceline.join() as session:
    layers = [Watched(300, 300) for _ in range(4)]
    model = FSDP(nn.Sequential(*layers), session.group, ShardingStrategy.STRATEGY, NODE, auto_wrap=Watched)
    optimizer = torch.optim.AdamW(model.parameters())
    emit("joined", rank=session.rank)
    try:
        for step in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 300)).square().mean().backward()
            optimizer.step()
    except paceline.PacelineError as error:
        emit_error(error)
        emit("held", layers=sum(not bool(layer.weight.isnan().all()) for layer in layers))
        raise SystemExit(0)
"""


KILL, RAISE = "os.kill(os.getpid(), signal.SIGKILL)", "raise KeyError('x')"


@pytest.mark.parametrize("where", [pytest.param("forward", marks=pytest.mark.exhaustive), "backward"])
@pytest.mark.parametrize(
    ("strategy", "node", "end", "error"),
    [
        pytest.param("FULL_SHARD", None, KILL, "PeerLost", marks=pytest.mark.exhaustive),
        pytest.param("HYBRID_SHARD", 2, KILL, "PeerLost", marks=pytest.mark.slow),
        pytest.param("FULL_SHARD", None, RAISE, "PeerRaised", marks=pytest.mark.slow),
        pytest.param("HYBRID_SHARD", 2, RAISE, "PeerRaised", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("engine", ["links", pytest.param("gloo", marks=pytest.mark.slow)])
def test_survivors_raise_one_typed_error_and_free_memory(
    engine: str, where: str, strategy: str, node: int | None, end: str, error: str
) -> None:
    """With an engine the model is on a device, which is a fake."""
    code = CODE.replace("END", end).replace("STRATEGY", strategy).replace("NODE", str(node))
    code = f"WHERE = {where!r}\n{ON_DEVICE if engine != 'links' else ''}{code}"
    with (
        coordinator() as address,
        workers(4, code, COORDINATOR=address, MIN_WORKERS="4", ENGINE=engine) as started,
    ):
        ranks = {worker.expect("joined", timeout=40)["rank"]: worker for worker in started}
        for rank in (0, 2, 3):
            told = ranks[rank].expect("error", timeout=30)
            assert (told["type"], told["ranks"]) == (error, [1])
            assert ranks[rank].expect("held")["layers"] == 0
            assert ranks[rank].wait() == 0
