"""A worker that dies or raises in the middle of a sharded pass: one typed error everywhere else, and no memory kept."""

from __future__ import annotations

import pytest

from paceline.testing import coordinator
from support.processes import workers

CODE = """
from paceline import FSDP, ShardingStrategy, nn, optim

class Watched:
    '''A layer that calls `act(step)` when it runs.'''
    def __init__(self, layer, where):
        self.layer, self.where = layer, where
        self.named_parameters = layer.named_parameters
    def forward(self, x):
        if self.where == "forward":
            act()
        return self.layer.forward(x)
    def backward(self, dy):
        if self.where == "backward":
            act()
        return self.layer.backward(dy)

def act():
    if step == 3 and session.rank == 1:
        END

with paceline.join() as session:
    rng = np.random.default_rng(0)
    wrap = lambda module: FSDP(module, session.group, ShardingStrategy.STRATEGY, NODE)
    linears = [nn.Linear(300, 300, rng=rng) for _ in range(4)]
    fsdp = wrap(nn.Sequential(*(wrap(Watched(layer, WHERE if n == 2 else "")) for n, layer in enumerate(linears))))
    optimizer = optim.Adam(fsdp)
    emit("joined", rank=session.rank)
    try:
        for step in range(5):
            y = fsdp(np.ones((2, 300), np.float32))
            optimizer.zero_grad()
            fsdp.backward(y)
            optimizer.step()
    except paceline.PacelineError as error:
        emit_error(error)
        held = []
        for layer in linears:
            try:
                held.append(layer.weight.data.size)
            except paceline.StepOrderError:
                pass
        emit("held", sizes=held)
        raise SystemExit(0)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("strategy", "node"),
    [
        ("FULL_SHARD", None),
        pytest.param("SHARD_GRAD_OP", None, marks=pytest.mark.slow),
        pytest.param("NO_SHARD", None, marks=pytest.mark.slow),
        ("HYBRID_SHARD", 2),
    ],
)
@pytest.mark.parametrize(
    ("end", "error"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "PeerLost"),
        pytest.param("raise KeyError('x')", "PeerRaised", marks=pytest.mark.slow),
    ],
)
def test_a_failed_rank_raises_at_the_others_and_frees_full_parameters(
    where: str, strategy: str, node: int | None, end: str, error: str
) -> None:
    code = CODE.replace("END", end).replace("STRATEGY", strategy).replace("NODE", str(node))
    with (
        coordinator() as address,
        workers(4, f"WHERE = {where!r}\n{code}", COORDINATOR=address, MIN_WORKERS="4") as started,
    ):
        ranks = {worker.expect("joined")["rank"]: worker for worker in started}
        for rank in (0, 2, 3):
            told = ranks[rank].expect("error")
            assert (told["type"], told["ranks"]) == (error, [1])
            spread = strategy in ("FULL_SHARD", "HYBRID_SHARD")
            assert ranks[rank].expect("held")["sizes"] == ([] if spread else [300 * 300] * 4)
            assert ranks[rank].wait() == 0
