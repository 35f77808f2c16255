"""Roots that differ: every rank gets one error that names both sides, and nothing hangs.

Other mismatches, over every kind of link: integration/test_reference_defects.
"""

import threading
from typing import Any

import numpy as np
import pytest

from paceline._group import Group
from paceline.errors import CollectiveMismatch
from paceline.testing import local_groups
from support.parts import be_patient, cut_frames, each
from support.worlds import errors_over

X = np.ones(4, np.float32)


@pytest.mark.parametrize("roots", [(0, 1), (1, 0), (0, 0, 0, 2), (3, 3, 3, 0), (0, 1, 2), (1, 2, 0), (2, 2, 2, 2, 0)])
@pytest.mark.parametrize("known", [True, False])
def test_different_roots_are_a_mismatch_on_every_rank(roots: Any, known: Any) -> None:
    """Here the tree may leave ranks waiting for each other with nothing sent: they must find out."""

    def rank(group: Group) -> None:
        root = roots[group.rank]
        group.broadcast(X if known or root == group.rank else None, root=root)
        group.barrier()

    errors = errors_over("local", len(roots), rank, patience_s=0.05)
    assert all(isinstance(error, CollectiveMismatch) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert "root=" in str(errors[0])


def test_two_roots_that_both_send_more_than_links_hold_are_a_mismatch() -> None:
    def rank(group: Group) -> None:
        cut_frames(group, 64)
        group.broadcast(np.ones(1000), root=group.rank)

    errors = errors_over("local", 2, rank, patience_s=0.05)
    assert all(isinstance(error, CollectiveMismatch) for error in errors), errors
    assert "root=0" in str(errors[0])
    assert "root=1" in str(errors[0])


def test_a_late_rank_is_not_a_mismatch() -> None:
    groups, late = local_groups(3), threading.Event()

    def rank(group: Group) -> float:
        be_patient(group, 0.01)
        if group.rank == 2:
            late.wait(10)
        total = 0.0
        for root in range(3):
            group.broadcast(X if group.rank == root else None, root=root)
            total += float(group.all_reduce(X)[0])
        return total

    threading.Timer(0.1, late.set).start()  # the others lose patience several times
    assert each(groups, rank) == [9.0] * 3
    for group in groups:
        group.close()
