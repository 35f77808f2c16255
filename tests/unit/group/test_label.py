"""The label of a collective: ranks must agree on it, and it is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline._group import Group
from paceline.errors import CollectiveMismatch, UnsupportedOp
from paceline.testing import run_ranks

X = np.ones(4)
CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda g, label: g.all_reduce(X, label=label),
    "reduce_scatter": lambda g, label: g.reduce_scatter(X, label=label),
    "all_gather": lambda g, label: g.all_gather(X, label=label),
    "all_gather uneven": lambda g, label: g.all_gather(X, label=label, uneven=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_equal_labels_are_recorded_and_different_ones_are_a_mismatch(call: Callable[..., Any]) -> None:
    def rank(g: Group) -> tuple[str, str]:
        expected = call(g, "")
        np.testing.assert_array_equal(call(g, "unit3"), expected)
        recorded = g._core.recorder.snapshot()[-1]
        with pytest.raises(CollectiveMismatch) as caught:
            call(g, f"unit{g.rank}")
        return str(recorded), str(caught.value)

    for recorded, text in run_ranks(2, rank):
        assert "unit3" in recorded
        assert "label=unit0" in text
        assert "label=unit1" in text


@pytest.mark.parametrize("label", ["two words", "x" * 41, "a=b", "é"])
def test_an_invalid_label_raises_unsupported_op(label: str) -> None:
    def rank(g: Group) -> None:
        for call in CALLS.values():
            with pytest.raises(UnsupportedOp, match="label"):
                call(g, label)
        assert g.all_reduce(X).sum() == 8  # nothing was sent

    run_ranks(2, rank)
