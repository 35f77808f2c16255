"""Ranks take turns in who sums a chunk: by operations' numbers, and only where the bits cannot tell."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from paceline.collectives.choose import choose, only
from paceline.collectives.engine import Engine
from paceline.collectives.program import Do
from paceline.group import Group
from paceline.testing import run_ranks

HALF = 8
"""Elements that each of two ranks sums."""


@pytest.mark.parametrize(("op", "lows"), [("sum", [[HALF, 0, HALF], [0, HALF, 0]]), ("max", [[0] * 3, [HALF] * 3])])
def test_another_rank_sums_a_chunk_in_every_second_operation(
    op: str, lows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    summed: list[list[int]] = [[], []]
    carry_out = Engine.run

    def run(engine: Engine, call: Any, program: Any, *rest: Any) -> None:
        summed[engine.mesh.rank] += [move.to_lo for move in program.moves if move.do is Do.FOLD]
        carry_out(engine, call, program, *rest)

    monkeypatch.setattr(Engine, "run", run)

    def three_times(group: Group) -> list[float]:
        group.choose = partial(choose, rules=only("all_reduce", "direct"))
        x = np.full(2 * HALF, group.rank + 1, np.float32)
        return [float(group.all_reduce(x, op=op).sum()) for _ in range(3)]

    total = 2 * HALF * (3 if op == "sum" else 2)
    assert run_ranks(2, three_times) == [[total] * 3] * 2
    assert summed == lows
