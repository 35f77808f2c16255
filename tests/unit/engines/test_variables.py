"""What the libraries of engines find in the environment."""

from __future__ import annotations

import logging

import pytest

from paceline.engines._variables import set_variables, variables_of


def test_missing_variables_are_set() -> None:
    environ = {"HOME": "/h"}
    set_variables("nccl", environ)
    assert environ == {"HOME": "/h", **variables_of("nccl")}
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "60"


def test_an_unusable_value_of_the_user_is_replaced_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "7"}
    with caplog.at_level(logging.WARNING):
        set_variables("nccl", environ)
        set_variables("nccl", environ)
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7"
    (said,) = caplog.messages
    assert said.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING=1 is replaced by 0, which the engine nccl needs")


class Watched(dict[str, str]):
    def __setitem__(self, name: str, value: str) -> None:
        raise AssertionError(f"{name} is set again")


def test_variables_that_are_already_right_are_not_set_again() -> None:
    set_variables("nccl", Watched(variables_of("nccl")))
    set_variables("ucc", Watched(variables_of("ucc")))


@pytest.mark.parametrize("engine", ["links", "gloo", "mpi", "xccl", ""])
def test_other_engines_need_no_variables(engine: str) -> None:
    assert not variables_of(engine)
