"""The digits of the demo are scikit-learn's, though a worker does not import it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from paceline.demo import train
from paceline.demo.train import load_digits


def test_digits_have_the_same_bits_as_scikit_learns() -> None:
    from sklearn import datasets  # here, for each of pytest's processes loads this file

    found, given = load_digits(), datasets.load_digits()
    order = np.random.default_rng(0).permutation(1797)
    x, t = np.concatenate(found[::2]), np.concatenate(found[1::2])
    assert x.tobytes() == (given.data[order] / 16).astype(np.float32).tobytes()
    assert t.tobytes() == given.target[order].astype(np.int64).tobytes()
    assert len(found[2]) == len(found[3]) == 359


def test_a_worker_does_not_import_scikit_learn() -> None:
    code = "import sys; from paceline.demo.train import load_digits; load_digits(); print('sklearn' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_without_scikit_learn_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "find_spec", lambda _name: None)
    with pytest.raises(ImportError, match="scikit-learn, which is not installed"):
        load_digits()
