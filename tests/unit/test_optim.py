"""Optimizers against their formulas written out plainly, and what must not change."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline._parallel import Parameter
from paceline.errors import SizeMismatch
from paceline.optim import SGD, Adam, Optimizer

Array = NDArray[Any]


class Bag:
    """Parameters without a model."""

    def __init__(self, **parameters: Parameter) -> None:
        self.parameters = parameters

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self.parameters.items()


def bag(dtype: str = "float64") -> Bag:
    rng = np.random.default_rng(1)
    return Bag(
        w=Parameter(rng.standard_normal((3, 4)).astype(dtype)),
        b=Parameter(rng.standard_normal(4).astype(dtype)),
        s=Parameter(np.array(0.5, dtype)),
        e=Parameter(np.zeros((0, 2), dtype)),
    )


def reference_sgd(
    data: Array, grads: list[Array], *, lr: float, momentum: float = 0, weight_decay: float = 0, nesterov: bool = False
) -> Array:
    velocity = np.zeros_like(data)
    for grad in grads:
        g = grad + weight_decay * data
        velocity = momentum * velocity + g
        data = data - lr * (g + momentum * velocity if nesterov else velocity)
    return data


def reference_adam(
    data: Array,
    grads: list[Array],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
) -> Array:
    m = v = np.zeros_like(data)
    for t, grad in enumerate(grads, start=1):
        g = grad + weight_decay * data
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        data = data - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return data


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("make", "reference", "settings"),
    [
        (SGD, reference_sgd, {"lr": 0.1}),
        (SGD, reference_sgd, {"lr": 0.1, "weight_decay": 0.3}),
        (SGD, reference_sgd, {"lr": 0.1, "momentum": 0.9}),
        (SGD, reference_sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3}),
        (SGD, reference_sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3, "nesterov": True}),
        (Adam, reference_adam, {"lr": 0.01}),
        (Adam, reference_adam, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.3}),
    ],
)
def test_steps_match_the_reference_formula(
    make: Callable[..., Optimizer], reference: Callable[..., Array], settings: Any, dtype: str
) -> None:
    module, start = bag(dtype), bag()
    optimizer = make(module, **settings)
    arrays = {path: p.data for path, p in module.named_parameters()}
    rng = np.random.default_rng(2)
    grads = {path: [rng.standard_normal(p.data.shape) for _ in range(7)] for path, p in module.named_parameters()}
    for step in range(7):
        for path, p in module.named_parameters():
            p.grad = grads[path][step]
        kept = [p.grad.copy() for _, p in module.named_parameters() if p.grad is not None]
        optimizer.step()
        for (_, p), before in zip(module.named_parameters(), kept, strict=True):
            np.testing.assert_array_equal(p.grad, before)
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    for path, p in module.named_parameters():
        assert p.data is arrays[path]
        expected = reference(start.parameters[path].data, grads[path], **settings)
        np.testing.assert_allclose(p.data, expected, rtol=tolerance, atol=tolerance, err_msg=path)


@pytest.mark.parametrize("make", [lambda m: SGD(m, 0.1, momentum=0.9, weight_decay=0.1), lambda m: Adam(m, 0.1)])
def test_parameters_that_are_frozen_or_lack_a_gradient_do_not_change(make: Callable[[Bag], Optimizer]) -> None:
    module = Bag(used=Parameter(np.ones(2)), unused=Parameter(np.ones(2)), frozen=Parameter(np.ones(2), False))
    optimizer = make(module)
    for p in module.parameters.values():
        p.grad = np.ones(2)
    optimizer.step()
    optimizer.zero_grad()
    saved = optimizer.state_dict()["state"]
    before = {path: p.data.copy() for path, p in module.named_parameters()}
    module.parameters["used"].grad = np.ones(2)
    optimizer.step()
    assert list(saved) == ["used", "unused"]
    np.testing.assert_equal(optimizer.state_dict()["state"]["unused"], saved["unused"])
    assert {path for path, p in module.named_parameters() if not np.array_equal(p.data, before[path])} == {"used"}
    np.testing.assert_array_equal(module.parameters["frozen"].data, 1)


@pytest.mark.parametrize("make", [lambda m: SGD(m, 0.1, momentum=0.9), lambda m: Adam(m, 0.1)])
def test_a_loaded_optimizer_continues_as_the_saved_one(make: Callable[[Bag], Optimizer]) -> None:
    def steps(module: Bag, optimizer: Optimizer, count: int) -> None:
        for i in range(count):
            for p in module.parameters.values():
                p.grad = np.full(p.data.shape, i + 1.0)
            optimizer.step()

    first, second = bag(), bag()
    a, b = make(first), make(second)
    a.lr = 0.05
    steps(first, a, 3)
    saved = a.state_dict()
    for path, p in second.named_parameters():
        p.data = first.parameters[path].data
    arrays = [id(x) for state in b._state.values() for x in state.values() if isinstance(x, np.ndarray)]
    b.load_state_dict(saved)
    assert arrays == [id(x) for state in b._state.values() for x in state.values() if isinstance(x, np.ndarray)]
    steps(first, a, 3)
    steps(second, b, 3)
    assert b.lr == 0.05
    for path, p in second.named_parameters():
        np.testing.assert_array_equal(p.data, first.parameters[path].data)
    np.testing.assert_equal(a.state_dict(), b.state_dict())


def test_state_that_does_not_fit_is_refused_and_nothing_is_loaded() -> None:
    module = Bag(a=Parameter(np.zeros(2)), b=Parameter(np.zeros(3)))
    optimizer = Adam(module)
    saved = optimizer.state_dict()
    del saved["state"]["a"], saved["state"]["b"]["updates"], saved["settings"]["eps"]
    saved["state"]["c"] = {}
    saved["state"]["b"]["mean"] = np.ones(4)
    saved["state"]["b"]["more"] = 1
    saved["settings"]["lr"] = 77
    with pytest.raises(SizeMismatch) as caught:
        optimizer.load_state_dict(saved)
    assert str(caught.value) == (
        "the state does not fit this Adam: setting 'eps' is missing; state of 'a' is missing; state of 'c' is "
        "unexpected; b: 'updates' is missing; b: 'more' is unexpected; b: 'mean' has shape [4], not [3]"
    )
    assert optimizer.lr == 1e-3


def test_loading_state_without_momentum_is_refused_if_momentum_is_set() -> None:
    module = bag()
    with pytest.raises(SizeMismatch, match="w: 'momentum' is missing"):
        SGD(module, 0.1, momentum=0.9).load_state_dict(SGD(module, 0.1).state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda m: SGD(m, lr=-1),
        lambda m: SGD(m, lr=float("nan")),
        lambda m: SGD(m, lr=1, nesterov=True),
        lambda m: Adam(m, betas=(0.9, 1.0)),
        lambda m: Adam(m, eps=-1e-8),
    ],
)
def test_invalid_settings_raise_value_error(make: Callable[[Bag], Optimizer]) -> None:
    with pytest.raises(ValueError, match=r"must|needs"):
        make(bag())


@pytest.mark.parametrize(
    "make", [lambda m: SGD(m, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True), lambda m: Adam(m, weight_decay=0.1)]
)
def test_a_step_allocates_nothing_of_the_parameters_size(make: Callable[[Bag], Optimizer]) -> None:
    module = Bag(w=Parameter(np.ones(100_000)))
    module.parameters["w"].grad = np.ones(100_000)
    optimizer = make(module)
    optimizer.step()
    tracemalloc.start()
    try:
        optimizer.step()
        assert tracemalloc.get_traced_memory()[1] < 100_000  # bytes; the parameter has 800,000
    finally:
        tracemalloc.stop()
