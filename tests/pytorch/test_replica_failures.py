"""A reduction that fails does not part a rank from its mates: in a step it raises at the gate, elsewhere at once."""

from __future__ import annotations

import pytest
from pytorch.replica_ranks import run_replicas

pytestmark = pytest.mark.needs(what="torch")

_LOST = """
from paceline.errors import PacelineError

model, alone = sharded(built()), sharded(built())
replicated = paceline.torch.replicate(model, group)
loss_of(model, mine).backward()
dist.barrier()
if replica == 1:
    emit("done")
    os._exit(0)
model.zero_grad()
"""


def test_in_a_step_the_backward_pass_goes_on_with_the_gradients_of_the_replica() -> None:
    run_replicas(
        _LOST
        + """
replicated.begin_step()
loss_of(model, mine).backward()
loss_of(alone, mine).backward()
assert replicated._driver.failed and group._core.mesh.fault.failed
replicated.sync_gradients()
for p, q in zip(model.parameters(), alone.parameters(), strict=True):
    assert torch.equal(local(p.grad), local(q.grad))
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
replicated.drop_gradients()
assert all(p.grad is None for p in model.parameters()) and not replicated._driver.failed
emit("done")
os._exit(0)
"""
    )


def test_outside_of_steps_the_backward_pass_raises() -> None:
    run_replicas(
        _LOST
        + """
try:
    loss_of(model, mine).backward()
except PacelineError:
    emit("done")
    os._exit(0)
"""
    )
