"""What each kind of object gives, takes and puts back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.elastic.fakes import FRAMEWORK, Counter, ForeignModel, ForeignOptimizer, Normed, Tensor, framework

import paceline
from paceline._elastic.parts import check_fit, part_of, write_in_place
from paceline.checkpoint.tree import split
from paceline.errors import SizeMismatch, UnsupportedOp


def grads(model: Any) -> list[Any]:
    return [p.grad for _, p in model.named_parameters()]


def test_model_part_gives_live_arrays_and_a_tied_parameter_once() -> None:
    model = Normed()
    part = part_of("model", model)
    assert list(part.arrays()) == ["weight", "bias"]
    assert part.arrays()["weight"] is model.linear.weight.data
    assert part.gated() is None


def test_put_back_restores_buffers_in_place_but_not_weights() -> None:
    model = Normed()
    part, buffer = part_of("model", model), model.mean
    small = part.small()
    model.forward(np.ones((2, 4)))
    model.backward(np.ones((2, 3)))
    model.linear.weight.data[0, 0] = 77
    part.put_back(small)
    part.clear_gradients()
    assert model.mean is buffer
    assert buffer.tolist() == [0] * 4
    assert grads(model) == [None] * 3
    assert model.linear.weight.data[0, 0] == 77, "large state is not the undo's to change"


def test_frozen_parameters_are_part_of_the_small_state() -> None:
    model, other = Normed(), Normed()
    part, frozen = part_of("model", model), model.linear.bias
    small = part.small()
    frozen.requires_grad = False
    assert split(part.rest())[0] != split(part_of("model", other).rest())[0]
    part_of("model", other).load_rest(part.rest())
    assert [p.requires_grad for _, p in other.named_parameters()] == [True, False, True]
    part.put_back(small)
    assert frozen.requires_grad


def test_an_old_checkpoint_with_buffers_alone_can_be_loaded() -> None:
    model = Normed()
    model.linear.bias.requires_grad = False
    part_of("model", model).load_rest({"mean": np.full(4, 2.0)})
    assert model.mean.tolist() == [2] * 4
    assert not model.linear.bias.requires_grad
    part_of("model", paceline.nn.Linear(2, 2, rng=np.random.default_rng(0))).load_rest({})


def test_a_foreign_model_gives_live_arrays_and_restores_buffers() -> None:
    model = ForeignModel()
    part = part_of("model", model)
    assert list(part.arrays()) == ["weight"]
    part.arrays()["weight"][...] = 5
    assert (model.weight.numpy() == 5).all()
    model.weight.grad = object()
    part.clear_gradients()
    assert model.weight.grad is None
    small = part.small()
    model.running.numpy()[...] = 9
    part.put_back(small)
    assert not model.running.numpy().any()


@pytest.mark.parametrize("make", [lambda m: paceline.optim.SGD(m, lr=0.1, momentum=0.9), paceline.optim.Adam])
def test_an_optimizer_takes_over_the_state_of_another_in_place(make: Any) -> None:
    model, other = Normed(1), Normed(2)
    optimizer, its = make(model), make(other)
    for each, of in ((optimizer, model), (its, other)):
        of.forward(np.ones((2, 4)))
        of.backward(np.full((2, 3), 0.5 + (of is other)))
        each.step()
    its.lr = 0.5
    part, donor = part_of("optimizer", optimizer), part_of("optimizer", its)
    held = part.arrays()
    write_in_place(held, donor.arrays())
    part.load_rest(donor.rest())
    np.testing.assert_equal(optimizer.state_dict(), its.state_dict())
    assert all(part.arrays()[path] is array for path, array in held.items())
    assert part.gated() is optimizer


def test_put_back_restores_the_settings_of_an_optimizer() -> None:
    optimizer = paceline.optim.Adam(Normed(), lr=0.1)
    part = part_of("optimizer", optimizer)
    small = part.small()
    optimizer.lr = 3.0
    part.put_back(small)
    assert optimizer.lr == 0.1


def test_an_optimizer_refuses_the_state_of_another_kind() -> None:
    optimizer = paceline.optim.SGD(Normed(), lr=0.1)
    part = part_of("optimizer", optimizer)
    with pytest.raises(SizeMismatch, match="SGD"):
        part.load_rest(part_of("optimizer", paceline.optim.Adam(Normed())).rest())
    assert list(optimizer.settings) == ["lr", "momentum", "weight_decay", "nesterov"]


def test_put_back_restores_values_in_place_where_possible() -> None:
    values: dict[str, Any] = {"a": np.zeros(2), "n": 1, "gone": 2, "deep": {"list": [1]}}
    array = values["a"]
    part = part_of("values", values)
    small = part.small()
    values["a"][:] = 5
    values["deep"]["list"].append(2)
    del values["gone"]
    values["new"] = 1
    part.put_back(small)
    assert values["a"] is array
    np.testing.assert_equal(values, {"a": np.zeros(2), "n": 1, "gone": 2, "deep": {"list": [1]}})
    values["a"] = np.zeros(3)
    part.put_back(small)
    assert values["a"].shape == (2,)
    values["deep"]["list"].append(3)
    assert small["deep"]["list"] == [1], "what was kept is a copy"


def test_an_object_with_a_state_dict_is_restored_from_a_copy() -> None:
    counter = Counter([1])
    part = part_of("counter", counter)
    assert part.kind == "Counter"
    small = part.small()
    counter.value.append(2)
    part.put_back(small)
    assert counter.value == [1]
    assert part.gated() is None


def test_a_foreign_optimizer_is_gated_and_its_settings_are_restored() -> None:
    model = ForeignModel()
    optimizer = ForeignOptimizer(model)
    part = part_of("optimizer", optimizer)
    assert part.gated() is optimizer
    scale = optimizer.param_groups[0]["scale"]
    small = part.small()
    optimizer.param_groups[0]["lr"] = 9.0
    scale._values += 9
    optimizer.step()
    part.put_back(small)
    assert optimizer.param_groups[0] == {"params": [model.weight], "lr": 0.1, "scale": scale}
    assert scale.numpy() == 1
    assert (optimizer.momentum.numpy() == 1).all()
    model.weight.grad = 1
    part.clear_gradients()
    assert model.weight.grad is None


def test_foreign_arrays_are_saved_as_numpy_and_restored_on_load() -> None:
    optimizer = ForeignOptimizer(ForeignModel())
    optimizer.step()
    part = part_of("optimizer", optimizer)
    rest = part.rest()
    assert rest["frameworks"] == [FRAMEWORK, ""]
    assert type(rest["state"]["state"][0]["momentum"]) is np.ndarray
    optimizer.momentum.numpy()[...] = 8
    with framework():
        part.load_rest(rest)
    assert (optimizer.momentum.numpy() == 1).all()
    optimizer.momentum.numpy()[...] = 9
    assert (rest["state"]["state"][0]["momentum"] == 1).all(), "what was given stays the giver's"


def test_loading_arrays_of_a_missing_framework_is_refused() -> None:
    part = part_of("optimizer", ForeignOptimizer(ForeignModel()))
    with pytest.raises(UnsupportedOp, match=f"'{FRAMEWORK}', which this process has not imported"):
        part.load_rest(part.rest())


@pytest.mark.parametrize("thing", [3, [1], np.zeros(2), object(), None])
def test_an_unsupported_object_is_refused_as_a_part(thing: Any) -> None:
    with pytest.raises(UnsupportedOp, match="extra is a "):
        part_of("extra", thing)


def test_a_parameter_without_accessible_memory_is_refused() -> None:
    class Odd:
        def named_parameters(self) -> list[tuple[str, Any]]:
            return [("w", 5)]

    with pytest.raises(UnsupportedOp, match="memory of a int"):
        part_of("model", Odd()).arrays()


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ({"a": np.ones(3), "b": np.ones(3)}, "b is on one side only"),
        ({}, "a is on one side only"),
        ({"a": np.ones(2)}, r"a is float64\[2\], not float32\[3\]"),
        ({"a": np.ones(3, complex)}, "complex128"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_change_nothing(there: dict[str, Any], says: str) -> None:
    here = {"a": np.zeros(3, np.float32)}
    with pytest.raises(SizeMismatch, match=says):
        check_fit(here, there)
    with pytest.raises(SizeMismatch, match=says):
        write_in_place(here, there)
    assert not here["a"].any()


def test_the_framework_of_a_foreign_array_is_recorded() -> None:
    with framework():
        assert part_of("x", Counter(Tensor(np.ones(2)))).rest()["frameworks"] == [FRAMEWORK]
