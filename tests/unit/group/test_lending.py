"""What a rank has lent stays lent until it has been read, however long that takes."""

import threading
from functools import partial

import numpy as np

from paceline._collectives.choose import choose, only
from paceline._group import Group
from paceline.testing import run_ranks
from support.parts import be_patient


def test_looking_for_early_frames_does_not_release_lent_arrays_in_use() -> None:
    """The root holds rank 1's lent array while it waits for rank 2, longer than it takes it to look around."""
    late = threading.Event()

    def rank(group: Group) -> float | None:
        be_patient(group, 0.02)
        group._core.choose = partial(choose, rules=only("reduce", "star"))
        x = np.full(50_000, 1.0)
        if group.rank == 2:
            late.wait(0.3)
        total = group.reduce(x, root=0)
        x[:] = 1e9  # the caller's again
        return None if total is None else float(total.max())

    assert run_ranks(3, rank) == [3.0, None, None]
