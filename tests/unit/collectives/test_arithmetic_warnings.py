"""NumPy warns of nothing while arrays are summed, and of what it did before everywhere else."""

from __future__ import annotations

import numpy as np
import pytest

from paceline._collectives.arithmetic import arithmetic, reduction


def test_summing_ignores_overflow_and_keeps_the_errstate_of_the_user() -> None:
    total, huge = arithmetic(reduction("sum", np.dtype(np.float32)), 2), np.full(2, 3e38, np.float32)
    with np.errstate(all="raise"):
        before = np.geterr()
        total.combine(huge, huge, huge)
        assert np.geterr() == before
        with pytest.raises(FloatingPointError):
            np.add(np.float32(3e38), np.float32(3e38))
    assert np.isinf(huge).all()
