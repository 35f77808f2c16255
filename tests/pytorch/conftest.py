"""Without PyTorch there is nothing to collect here; with it, every rank of a test computes in one thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of ranks begin with this, whatever the main one is told

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True)
def one_thread_each() -> Iterator[None]:
    """Ranks are threads or processes already; more of torch's would fight over the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
