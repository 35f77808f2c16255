"""Where what travels lies: in memory of the group's, so that links need no copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from unit.parallel.helpers import Array
from unit.parallel.sharding.models import ONE, chosen, wrap

from paceline import nn
from paceline._group import Group
from paceline.testing import run_ranks


@pytest.mark.parametrize("wire", [None, np.float16])
@pytest.mark.parametrize(("world", "name"), [(2, "full"), (2, "grad"), (2, "none"), (4, "hybrid2")])
def test_fsdp_sends_only_memory_that_links_can_read_in_place(
    world: int, name: str, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Array] = []
    strangers: list[str] = []
    empty = Group.empty

    def remember(group: Group, *args: Any, **kwargs: Any) -> Array:
        made.append(empty(group, *args, **kwargs))
        return made[-1]

    def watch(call: str) -> None:
        inner = getattr(Group, call)

        def watched(group: Group, x: Array, **settings: Any) -> Any:
            if "unit" in settings.get("label", "") and not any(np.shares_memory(x, array) for array in made):
                strangers.append(call)
            return inner(group, x, **settings)

        monkeypatch.setattr(Group, call, watched)

    monkeypatch.setattr(Group, "empty", remember)
    for call in ("all_gather", "reduce_scatter", "all_reduce"):
        watch(call)

    def rank(group: Group) -> None:
        fsdp = wrap(
            [nn.Linear(2, 2, rng=np.random.default_rng(0))], group, "one", communication_dtype=wire, **chosen(name)
        )
        fsdp(ONE)
        fsdp.backward(ONE)

    run_ranks(world, rank)
    assert made
    assert not strangers
