"""A training state holds the local tensors of DTensors; what another rank's state gives becomes DTensors again."""

from __future__ import annotations

import pytest
from pytorch.replica_ranks import run_replicas

pytestmark = pytest.mark.needs(what="torch")

_STATE = """
import json
import paceline
from paceline._elastic.parts import part_of, write_in_place

def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, mine).backward()
        optimizer.step()

def same(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(local(p), local(q))
"""


@pytest.mark.parametrize(
    "make", ["AdamW(p, fused=True)", "AdamW(p, foreach=True)", "SGD(p, lr=0.1, momentum=0.9, foreach=True)"]
)
def test_a_newcomer_goes_on_with_the_moments_of_another_rank(make: str) -> None:
    run_replicas(
        _STATE
        + f"""
make = lambda p: torch.optim.{make}
old, new = sharded(built()), sharded(built(seed=3))
first, second = make(old.parameters()), make(new.parameters())
train(old, first)
part, other = part_of("optimizer", first), part_of("optimizer", second)
rest = part.rest()
other.load_rest(rest)
for state in second.state.values():
    for name, value in state.items():
        assert isinstance(value, DTensor) or not value.ndim, name
write_in_place(part_of("model", new).arrays(), part_of("model", old).arrays())
same(old, new)
train(old, first)
train(new, second)
same(old, new)
"""
    )


def test_the_manifest_names_placements_and_those_of_plain_models_do_not_change() -> None:
    run_replicas(
        _STATE
        + """
described = {}
for name, model in (("plain", built()), ("sharded", sharded(built()))):
    optimizer = torch.optim.AdamW(model.parameters())
    found = json.loads(paceline.TrainState(model=model, optimizer=optimizer)._core.manifest())
    described[name] = json.dumps(found)
assert "Shard(dim=0)" in described["sharded"] and "inner=2" in described["sharded"], described["sharded"]
assert "Shard" not in described["plain"]
"""
    )


def test_rounds_of_local_training_are_those_of_one_layout_inside() -> None:
    run_replicas(
        _STATE
        + """
from paceline.errors import SizeMismatch

def state_of(mesh):
    net = sharded(built(), mesh)
    return paceline.TrainState(model=paceline.torch.DiLoCo(net, torch.optim.SGD(net.parameters(), lr=1.0), group))

state, other = state_of(inner), state_of(init_device_mesh("cpu", (2, k), mesh_dim_names=("replica", "tp"))["tp"])
assert "Shard(dim=0)" in state._core.manifest().decode() and "inner=2" in state._core.manifest().decode()
state_of(inner).load_state_dict(state.state_dict())
try:
    other.load_state_dict(state.state_dict())
except SizeMismatch as error:
    assert "spread in another way" in str(error)
    emit("done")
"""
    )
