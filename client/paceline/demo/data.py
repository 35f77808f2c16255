"""The handwritten digits of scikit-learn (1797 images of 8 x 8 pixels), and which of them are held back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Digits", "load_digits"]

_SPLIT_SEED = 0
"""All workers must hold back the same samples; the numbers in the README are of this split."""


@dataclass(frozen=True, slots=True)
class Digits:
    """Images as rows of 64 values from 0 to 1, and labels from 0 to 9; the test samples are never trained on."""

    train_x: NDArray[np.float32]
    train_t: NDArray[np.int64]
    test_x: NDArray[np.float32]
    test_t: NDArray[np.int64]


def load_digits() -> Digits:
    """The digits in a fixed random order, the last fifth held back.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn import datasets  # the optional dependency of this module alone

    loaded: Any = datasets.load_digits()
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(loaded.target))
    x = (loaded.data[order] / 16).astype(np.float32)  # pixels come as 0 to 16
    t = loaded.target[order].astype(np.int64)
    kept = len(t) - len(t) // 5
    return Digits(x[:kept], t[:kept], x[kept:], t[kept:])
