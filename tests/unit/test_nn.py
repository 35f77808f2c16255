"""Layers against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline import nn
from paceline.errors import SizeMismatch

Array = NDArray[Any]


def numerical_gradient(f: Callable[[], float], x: Array, h: float = 1e-6) -> Array:
    """Central differences of f by each element of x, which f reads."""
    gradient = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        kept = x[i]
        x[i] = kept + h
        above = f()
        x[i] = kept - h
        below = f()
        x[i] = kept
        gradient[i] = (above - below) / (2 * h)
    return gradient


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def test_network_gradients_match_finite_differences(rng: np.random.Generator) -> None:
    model = nn.Sequential(
        nn.Linear(4, 6, rng=rng, dtype=np.float64),
        nn.ReLU(),
        nn.Sequential(nn.Linear(6, 5, rng=rng, dtype=np.float64), nn.ReLU()),
        nn.Linear(5, 3, rng=rng, dtype=np.float64),
    )
    x, labels = rng.standard_normal((7, 4)), rng.integers(0, 3, 7)

    def loss() -> float:
        return nn.softmax_cross_entropy(model.forward(x), labels)[0]

    dx = model.backward(nn.softmax_cross_entropy(model.forward(x), labels)[1])
    np.testing.assert_allclose(dx, numerical_gradient(loss, x), rtol=1e-6, atol=1e-8)
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        expected = numerical_gradient(loss, parameter.data)
        np.testing.assert_allclose(parameter.grad, expected, rtol=1e-6, atol=1e-8, err_msg=path)


def test_cross_entropy_gradient_matches_finite_differences(rng: np.random.Generator) -> None:
    logits, labels = rng.standard_normal((5, 4)), rng.integers(0, 4, 5)
    _, dlogits = nn.softmax_cross_entropy(logits, labels)
    expected = numerical_gradient(lambda: nn.softmax_cross_entropy(logits, labels)[0], logits)
    np.testing.assert_allclose(dlogits, expected, atol=1e-9)


def test_cross_entropy_of_large_logits_is_finite() -> None:
    loss, dlogits = nn.softmax_cross_entropy(np.array([[1e4, -1e4], [0.0, 0.0]]), np.array([1, 0]))
    assert loss == pytest.approx((2e4 + np.log(2)) / 2)
    np.testing.assert_allclose(dlogits, [[0.5, -0.5], [-0.25, 0.25]])


@pytest.mark.parametrize(("batch", "labels"), [(0, 0), (2, 3), (2, 1)])
def test_cross_entropy_needs_one_label_for_each_sample(batch: int, labels: int) -> None:
    with pytest.raises(SizeMismatch, match="do not fit"):
        nn.softmax_cross_entropy(np.zeros((batch, 3)), np.zeros(labels, int))


def test_float32_stays_float32(rng: np.random.Generator) -> None:
    model = nn.Sequential(nn.Linear(4, 3, rng=rng), nn.ReLU())
    y = model.forward(np.ones((2, 4), np.float32))
    dx = model.backward(np.ones_like(y))
    assert {y.dtype, dx.dtype, *(p.data.dtype for _, p in model.named_parameters())} == {np.dtype(np.float32)}


def test_initial_weights_keep_the_variance(rng: np.random.Generator) -> None:
    y = nn.Linear(400, 400, rng=rng, dtype=np.float64).forward(rng.standard_normal((100, 400)))
    assert np.maximum(y, 0).std(ddof=0) ** 2 + np.maximum(y, 0).mean() ** 2 == pytest.approx(1, rel=0.1)


def test_parameters_and_buffers_have_paths_in_module_order(rng: np.random.Generator) -> None:
    class Shift:
        def named_parameters(self) -> tuple[()]:
            return ()

        def named_buffers(self) -> list[tuple[str, Array]]:
            return [("mean", np.zeros(2))]

        def forward(self, x: Any) -> Any:
            return x

        def backward(self, dy: Any) -> Any:
            return dy

    model = nn.Sequential(nn.Linear(2, 2, rng=rng), nn.Sequential(Shift(), nn.Linear(2, 2, rng=rng)))
    assert [path for path, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]
    assert [path for path, _ in model.named_buffers()] == ["1.0.mean"]


def test_a_layer_may_be_called_and_its_repr_shows_its_sizes(rng: np.random.Generator) -> None:
    model = nn.Sequential(nn.Linear(4, 16, rng=rng), nn.ReLU(), nn.Linear(16, 3, rng=rng))
    x = rng.standard_normal((5, 4)).astype(np.float32)
    assert np.array_equal(model(x), model.forward(x))
    for module in model.modules:
        assert np.array_equal(module(x), module.forward(x))  # type: ignore[operator]  # a `Module` need not be callable
        x = module.forward(x)
    assert repr(model) == "Sequential(Linear(4, 16), ReLU(), Linear(16, 3))"
