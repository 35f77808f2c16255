"""How much memory FSDP saves, in real processes: a count of bytes, whatever else the machine does."""

from __future__ import annotations

import pytest

from integration.equal_units import UNITS, facts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_full_shard_bounds_the_peak_of_parameter_memory() -> None:
    """W=4, 12 equal units of 4 MiB: what tracemalloc sees in the middle of every unit's forward and backward pass.

    In the second step: the first has made what stays.
    """
    code = """
import inspect, tracemalloc
from paceline._parallel.sharding._flat import Gradients
held, looks = [], False
of_parameters = ("/sharding/_flat.py", "/_links/registry.py", "<string>")
lines, first = inspect.getsourcelines(Gradients)  # their memory comes from the same place, and is no parameter's
of_gradients = range(first, first + len(lines))
def is_of_parameters(frames):  # the latest call last
    return frames[-1].filename.endswith(of_parameters) and not any(
        frame.lineno in of_gradients and frame.filename.endswith("/sharding/_flat.py") for frame in frames
    )
def act():
    if looks:
        traces = tracemalloc.take_snapshot().traces
        held.append(sum(trace.size for trace in traces if is_of_parameters(trace.traceback)))

with paceline.join() as session:
    n = 1 << 20
    tracemalloc.start(8)               # from before the model is built: what construction leaves behind counts
    fsdp = model(n, act, session.group)
    for looks in (False, True):
        fsdp(ONE)
        fsdp.backward(ONE)
    emit("facts", looks=len(held), peak=max(held), model=12 * 4 * n, unit=4 * n)
"""
    for rank in facts(4, code):
        bound = rank["model"] / 4 + 2 * rank["unit"]
        assert rank["looks"] == 2 * UNITS
        assert rank["model"] / 4 + rank["unit"] < rank["peak"] <= 1.05 * bound


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_each_of_four_ranks_holds_a_quarter_of_the_optimizer_state(strategy: str) -> None:
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
        assert rank["held"] <= 2 * (rank["whole"] / 4 + padding)
        assert rank["gradients"] <= rank["whole"] / 4 + padding
