"""Without torch nothing here is collected, nor are tests of what an older torch lacks (REQUIRE=torch: an error).

Trainers are tried with the newest torch only: there REQUIRE=torch asks for them too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from paceline.config import Config
from support.needs import is_required

os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of ranks begin with this, whatever the main one is told

collect_ignore_glob: list[str] = []
if find_spec("torch") is None:
    if is_required("torch"):
        raise RuntimeError("REQUIRE=torch, and torch is not installed")
    collect_ignore_glob = ["test_*.py"]
elif tuple(map(int, version("torch").split(".")[:2])) < (2, 15):
    collect_ignore_glob = ["test_reconfigure.py", "test_trainers.py", "test_true_backend.py"]
elif find_spec("accelerate") is None or find_spec("transformers") is None:
    if is_required("torch"):
        raise RuntimeError("REQUIRE=torch, and accelerate or transformers is not installed: make newest")
    collect_ignore_glob = ["test_trainers.py"]


if find_spec("datasets") is None and find_spec("torch") is not None:
    if is_required("torch"):
        raise RuntimeError("REQUIRE=torch, and datasets is not installed: make newest")
    collect_ignore_glob.append("test_huggingface_streams.py")


@pytest.fixture(params=["cpu", "device"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with models on the CPU, and once more with models on a device, which is a fake.

    At the place "engine" models are on that device too, and groups have an engine.
    """
    if request.param == "engine":
        monkeypatch.setattr("paceline.testing.Config", partial(Config, engine="gloo", failure_timeout=20.0))
    if request.param != "cpu":
        from pytorch.fake_device import install

        install(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def one_thread_each() -> Iterator[None]:
    """Ranks are threads or processes already; more of torch's would fight over the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
