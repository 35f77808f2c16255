"""What FSDP saves, and what fetching ahead is worth: measured in real processes over gRPC. `-s` prints the figures."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(300)]

UNITS = 12

MODEL = """
from paceline import FSDP, ShardingStrategy, nn, optim

class Block:
    '''y = x * w[0] with n parameters, and a place to act in the middle of each pass.'''
    def __init__(self, n, act):
        self.w = paceline.Parameter(np.full(n, 1, np.float32))
        self.act = act
    def named_parameters(self):
        yield "w", self.w
    def forward(self, x):
        self.act()
        return x * self.w.data[0]
    def backward(self, dy):
        self.act()
        self.w.accumulate(np.full(self.w.shape, dy.sum(), np.float32))
        return dy * self.w.data[0]

def model(n, act, group, **settings):
    blocks = [FSDP(Block(n, act), group, **settings) for _ in range(12)]
    return FSDP(nn.Sequential(*blocks), group, **settings)

ONE = np.ones((1, 1), np.float32)
"""


def facts(world: int, code: str) -> list[dict[str, Any]]:
    """What each of the workers tells in its event "facts"."""
    with coordinator() as address, workers(world, MODEL + code, COORDINATOR=address, MIN_WORKERS=str(world)) as started:
        found = [worker.expect("facts", timeout=120.0) for worker in started]
        assert [worker.wait() for worker in started] == [0] * world
        return found


def test_peak_of_parameter_memory_under_full_shard() -> None:
    """W=4, 12 equal units of 4 MiB: what tracemalloc sees in the middle of every unit's forward and backward pass."""
    code = """
import tracemalloc
held = []
of_parameters = [tracemalloc.Filter(True, f"*{file}") for file in ("/sharding/flat.py", "/group/core.py", "<string>")]
def act():
    if tracemalloc.is_tracing():
        lines = tracemalloc.take_snapshot().filter_traces(of_parameters).statistics("lineno")
        held.append(sum(line.size for line in lines))

with paceline.join() as session:
    n = 1 << 20
    tracemalloc.start()                # from before the model is built: what construction leaves behind counts
    fsdp = model(n, act, session.group)
    fsdp.prepare()
    held.clear()
    for _ in range(2):
        fsdp(ONE)
        fsdp.backward(ONE)
    emit("facts", looks=len(held), peak=max(held), model=12 * 4 * n, unit=4 * n)
"""
    for rank in facts(4, code):
        bound = rank["model"] / 4 + 2 * rank["unit"]
        print(f"\npeak of parameters {rank['peak'] / 2**20:.2f} MiB; a quarter and two units {bound / 2**20:.2f} MiB")
        assert rank["looks"] == 4 * UNITS
        assert rank["model"] / 4 + rank["unit"] < rank["peak"] <= 1.05 * bound


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_optimizer_state_is_a_quarter(strategy: str) -> None:
    code = f"""
with paceline.join() as session:
    n = 100_003
    fsdp = model(n, lambda: None, session.group, strategy=ShardingStrategy.{strategy})
    optimizer = optim.Adam(fsdp, 1e-3)
    fsdp(ONE)
    fsdp.backward(ONE)
    optimizer.step()
    states = optimizer.state_dict()["state"].values()
    held = sum(value.nbytes for state in states for value in state.values() if isinstance(value, np.ndarray))
    gradients = sum(p.grad.nbytes for _, p in fsdp.named_parameters())
    emit("facts", held=held, gradients=gradients, whole=12 * n * 4)
"""
    for rank in facts(4, code):
        padding = UNITS * 3 * 4
        print(f"\n{strategy}: Adam holds {rank['held']:,} bytes, two quarters are {2 * rank['whole'] // 4:,}")
        assert rank["held"] <= 2 * (rank["whole"] / 4 + padding)
        assert rank["gradients"] <= rank["whole"] / 4 + padding


@pytest.mark.parametrize("compute", ["sleep", "matmul"])
def test_fetching_ahead_is_faster(compute: str) -> None:
    """W=2, 12 units of 4 MiB with 5 ms of computation in each pass; with and without, turn and turn about.

    A sleep stands for a device of its own. Where the computation takes the same cores, the gain is smaller.
    """
    code = f"""
import time
a = np.ones((512, 512), np.float32)
def spend():
    if {compute!r} == "sleep":
        time.sleep(0.005)
    else:
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            a @ a

with paceline.join() as session:
    models = {{ahead: model(1 << 20, spend, session.group, ahead=ahead) for ahead in (0, 1)}}
    times = {{0: [], 1: []}}
    for round in range(13):
        for ahead, fsdp in models.items():
            session.group.barrier()
            start = time.perf_counter()
            fsdp(ONE)
            forward = time.perf_counter()
            fsdp.backward(ONE)
            times[ahead].append((forward - start, time.perf_counter() - start))
    emit("facts", off=times[0][1:], on=times[1][1:])
"""
    rank = facts(2, code)[0]
    off, on = ([statistics.median(column) * 1e3 for column in zip(*rank[key], strict=True)] for key in ("off", "on"))
    print(
        f"\n{compute}: forward {off[0]:.0f} ms without, {on[0]:.0f} ms with; the step {off[1]:.0f} ms, {on[1]:.0f} ms"
    )
    assert on[0] < (0.9 if compute == "sleep" else 0.97) * off[0]
    assert on[1] < 0.97 * off[1]
