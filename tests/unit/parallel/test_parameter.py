"""Parameters: what writing a gradient does, and who hears of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline._parallel import Parameter
from paceline._parallel._parameter import parameters_of
from paceline.errors import SizeMismatch, StepOrderError


class Listener:
    def __init__(self, *, refuse: bool = False) -> None:
        self.heard: list[str] = []
        self.refuse = refuse

    def before_gradient(self, parameter: Parameter) -> None:
        if self.refuse:
            raise StepOrderError("no")
        self.heard.append(f"before {None if parameter.grad is None else parameter.grad.tolist()}")

    def after_gradient(self, parameter: Parameter) -> None:
        self.heard.append(f"after {None if parameter.grad is None else parameter.grad.tolist()}")


def test_accumulate_copies_then_adds_in_place() -> None:
    p, g = Parameter(np.zeros(2)), np.array([1.0, 2.0])
    p.accumulate(g)
    first = p.grad
    p.accumulate(g)
    assert p.grad is first
    np.testing.assert_array_equal(p.grad, [2, 4])
    np.testing.assert_array_equal(g, [1, 2])


def test_setting_the_gradient_copies_and_casts() -> None:
    p, g = Parameter(np.zeros(2, np.float32)), np.array([1.0, 2.0])
    p.grad = g
    g[:] = 0
    assert p.grad is not None
    assert p.grad.dtype == np.float32
    np.testing.assert_array_equal(p.grad, [1, 2])


def test_a_listener_is_called_before_and_after_each_write() -> None:
    p, listener = Parameter(np.zeros(1)), Listener()
    p._watch(listener)
    p.accumulate([1])
    p.grad = np.array([5.0])
    p.grad += 1
    p.grad = None
    p._unwatch(listener)
    p.accumulate([9])
    assert listener.heard == [
        "before None",
        "after [1.0]",
        "before [1.0]",
        "after [5.0]",
        "before [6.0]",
        "after [6.0]",
    ]
    assert (p.writes, p.clears) == (4, 1)


def test_a_write_refused_by_a_listener_changes_nothing() -> None:
    p = Parameter(np.zeros(1))
    p.accumulate([1])
    p._watch(Listener(refuse=True))
    for write in (p.accumulate, lambda g: setattr(p, "grad", g)):
        with pytest.raises(StepOrderError):
            write([7])
    np.testing.assert_array_equal(p.grad, [1])


def test_a_frozen_parameter_ignores_gradients() -> None:
    p = Parameter(np.zeros(1), requires_grad=False)
    p.accumulate([1])
    assert p.grad is None


def test_assigning_data_writes_into_the_same_array() -> None:
    p = Parameter(np.zeros(2))
    array = p.data
    p.data = np.array([1.0, 2.0])
    p.data -= 1
    assert p.data is array
    np.testing.assert_array_equal(array, [0, 1])


@pytest.mark.parametrize("value", [1.0, [1.0], [[1.0, 2.0]]])
def test_values_of_another_shape_raise_size_mismatch(value: Any) -> None:
    p = Parameter(np.zeros(2))
    with pytest.raises(SizeMismatch, match=r"parameter of shape \(2,\)"):
        p.accumulate(value)
    with pytest.raises(SizeMismatch):
        p.grad = value
    with pytest.raises(SizeMismatch):
        p.data = value


def test_tied_parameters_are_listed_once_by_first_path() -> None:
    class Tied:
        def __init__(self) -> None:
            self.a, self.b = Parameter(1.0), Parameter(2.0)

        def named_parameters(self) -> list[tuple[str, Parameter]]:
            return [("x", self.a), ("y", self.b), ("z", self.a)]

    assert list(parameters_of(Tied())) == ["x", "y"]
    assert repr(Parameter(np.zeros((2, 3)), False)) == "Parameter(float64 [2, 3], requires_grad=False)"
