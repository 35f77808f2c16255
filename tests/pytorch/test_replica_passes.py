"""Several backward passes of replicas add up as in one process, with the weight of the replica on all of them once."""

from __future__ import annotations

import pytest
from pytorch.replica_ranks import run_replicas

pytestmark = pytest.mark.needs(what="torch")

WEIGHTED = """
import contextlib

weight = (3.0, 1.0)[replica]

def weighted(model, *inputs):
    \"\"\"The gradients of one process, where replica 0 counts three times as much.\"\"\"
    model.zero_grad()
    for x in inputs:
        (loss_of(model, x[: 8]) * 0.75 + loss_of(model, x[8:]) * 0.25).backward()
    return model

model, reference = sharded(built()), built()
replicated = paceline.torch.replicate(model, group)
replicated._driver._next_weight = lambda: weight  # as a step's share of samples
X2 = X.flip(0) * 2
mine2 = X2[rank * 16 // world:][: 16 // world]
"""


def test_one_pass_is_weighted() -> None:
    run_replicas(
        WEIGHTED
        + """
for step in range(2):
    model.zero_grad()
    loss_of(model, mine).backward()
    check(model, weighted(reference, X))
"""
    )


def test_passes_that_are_each_reduced_add_up() -> None:
    run_replicas(
        WEIGHTED
        + """
for step in range(2):
    model.zero_grad()
    loss_of(model, mine).backward()
    loss_of(model, mine2).backward()
    check(model, weighted(reference, X, X2))
"""
    )


@pytest.mark.parametrize("syncs_inside", [True, False])
def test_passes_in_no_sync_are_reduced_with_the_next_one(syncs_inside: bool) -> None:
    run_replicas(
        WEIGHTED
        + f"""
for step in range(2):
    model.zero_grad()
    model.set_requires_gradient_sync({syncs_inside})
    with replicated.no_sync():
        loss_of(model, mine).backward()
        loss_of(model, mine2).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, mine2).backward()
    check(model, weighted(reference, X, X2, X2))
"""
    )


def test_sync_gradients_reduces_the_passes_in_no_sync() -> None:
    run_replicas(
        WEIGHTED
        + """
for step in range(2):
    model.zero_grad()
    with replicated.no_sync():
        loss_of(model, mine).backward()
        loss_of(model, mine2).backward()
    replicated.sync_gradients()
    check(model, weighted(reference, X, X2))
"""
    )


def test_a_copy_of_a_replicated_module_is_a_plain_module() -> None:
    run_replicas("""
model = built()
paceline.torch.replicate(model, group).prepare()
other = copy.deepcopy(model)
if replica == 0:  # alone: a collective would hang
    loss_of(other, ours).backward()
    assert all(p.grad is not None for p in other.parameters())
""")
