"""A dict of tensors in a training state, such as averaged weights: given, undone and loaded where the tensors lie."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from unit.elastic.solo import ENVIRONMENT, fail

import paceline
from paceline import checkpoint
from paceline.checkpoint.tree import join, split

pytestmark = pytest.mark.needs(what="torch")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    with paceline.join() as joined:
        yield joined


def values(filled: float) -> dict[str, Any]:
    return {
        "mean": torch.full((3, 2), filled),
        "deep": {"half": torch.full((4,), filled, dtype=torch.bfloat16), "list": [torch.tensor(filled), 1]},
        "column": torch.full((2, 3), filled).t(),
        "trained": torch.nn.Parameter(torch.full((2,), filled)),
        "empty": torch.zeros(0, 3),
        "array": torch.full((2,), filled).numpy(),
        "count": int(filled),
    }


def tensors(there: dict[str, Any]) -> list[Any]:
    return [there["mean"], there["deep"]["half"], there["deep"]["list"][0], there["column"], there["trained"]]


def test_tensors_are_loaded_in_place(tmp_path: Any) -> None:
    kept = values(0.0)
    donor, newcomer, here = (paceline.TrainState(ema=ema) for ema in (values(2.0), values(0.0), kept))
    donor._core.check_round_trip()
    assert donor._core.manifest() == newcomer._core.manifest()
    before = tensors(kept)
    skeleton, arrays = split(donor.state_dict())
    here.load_state_dict(join(skeleton, arrays))
    assert [a is b for a, b in zip(tensors(kept), before, strict=True)] == [True] * 5
    assert all((tensor == 2).all() for tensor in before)
    assert (kept["array"] == 2).all()
    assert kept["count"] == 2
    assert kept["trained"].requires_grad
    assert here.fingerprint() == donor.fingerprint()

    checkpoint.save(tmp_path, donor.state_dict(), (1, 1))
    found = checkpoint.load(tmp_path)
    assert found is not None
    newcomer.load_state_dict(found.state)
    assert newcomer.fingerprint() == donor.fingerprint()


def test_missing_entries_are_loaded_as_tensors() -> None:
    donor, ema = paceline.TrainState(ema=values(2.0)), OrderedDict[str, Any](deep={}, mean=torch.zeros(1))
    paceline.TrainState(ema=ema).load_state_dict(donor.state_dict())
    assert all(isinstance(tensor, torch.Tensor) and (tensor == 2).all() for tensor in tensors(ema))
    assert ema["deep"]["half"].dtype == torch.bfloat16
    assert ema["mean"].shape == (3, 2)


def test_undo_restores_averaged_weights(session: Any) -> None:
    net = torch.nn.Linear(2, 1)
    torch.nn.init.ones_(net.weight)
    ema = {path: p.detach().clone() for path, p in net.named_parameters()}
    held = ema["weight"]
    seen = []
    for step in session.steps(paceline.TrainState(net=net, ema=ema), total=3):
        with step:
            ema["weight"].mul_(0.5)
            if step.number == 2 and step.attempt == 1:
                fail(session)
        seen.append(float(held[0, 0]))
    assert ema["weight"] is held
    assert seen == [0.5, 0.5, 0.25, 0.125]


def test_an_averaged_model_is_not_copied(session: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Linear(2, 1)
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = paceline.TrainState(net=net, averaged=averaged, optimizer=optimizer)
    assert list(state._core.small()["averaged"]["buffers"]) == ["n_averaged"]
    expected = averaged.module.weight.detach().clone()
    for step in session.steps(state, total=3):
        with step:
            optimizer.zero_grad()
            net(torch.ones(1, 2)).sum().backward()
            if step.number == 2 and step.attempt == 1:
                fail(session)
            optimizer.step()
            averaged.update_parameters(net)
        if step.applied:
            expected = net.weight.detach().clone() if step.number == 1 else (expected + net.weight.detach()) / 2
    torch.testing.assert_close(averaged.module.weight.detach(), expected)
    assert averaged.n_averaged == 3
