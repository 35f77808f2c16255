"""NumPy warns of nothing while arrays are summed, and of what it did before everywhere else."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.collectives.arithmetic import _Quiet


@pytest.mark.parametrize("version", [np.__version__, "1.26.4", "2.0.0"])
def test_it_is_quiet_and_nothing_else_is(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.0 NumPy's errors were a thread's, and what was said of them in a context stayed said."""
    monkeypatch.setattr(np, "__version__", version)
    before, quiet, huge = np.geterr(), _Quiet(), np.full(2, 3e38, np.float32)
    quiet.run(np.add, huge, huge, out=huge)
    assert np.isinf(huge).all()
    assert np.geterr() == before
    with pytest.warns(RuntimeWarning, match="overflow"):
        np.add(np.float32(3e38), np.float32(3e38))


def test_a_users_own_state_of_errors_is_not_ours() -> None:
    with np.errstate(all="raise"):
        huge = np.full(2, 3e38, np.float32)
        _Quiet().run(np.add, huge, huge, out=huge)
        assert np.isinf(huge).all()
