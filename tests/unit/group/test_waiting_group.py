"""A group without members: whoever waits to be taken in is told so, whatever it calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline._group import Group
from paceline._links.nowhere import NoMesh
from paceline.config import Config
from paceline.errors import StepOrderError

X = np.ones(4)

CALLS: dict[str, Callable[[Group], Any]] = {
    "all_reduce": lambda group: group.all_reduce(X),
    "barrier": Group.barrier,
    "broadcast": lambda group: group.broadcast(X),
    "broadcast_object": lambda group: group.broadcast_object(X.tolist()),
    "gather": lambda group: group.gather(X),
    "scatter": lambda group: group.scatter(X),
    "reduce": lambda group: group.reduce(X),
    "send": lambda group: group.send(X, 0),
    "recv": lambda group: group.recv(0),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_in_a_group_without_a_view_raise_step_order_error(name: str) -> None:
    group = Group(NoMesh("this worker waits to be taken in"), Config())
    with pytest.raises(StepOrderError, match="waits to be taken in"):
        CALLS[name](group)
