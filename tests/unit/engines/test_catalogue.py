"""The engine of docs/engines.md is found by its name, as an installed package's is, and trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import nn
from paceline.config import Config
from paceline.engines._catalogue import load_engine, make_engine
from paceline.errors import LinkUnavailable
from paceline.testing import local_groups, run_groups
from support.blocks import ROOT, blocks

(STAR,) = (block.code for block in blocks(ROOT / "docs/engines.md") if block.title == "star_engine.py")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which the package is installed."""
    (tmp_path / "star_engine.py").write_text(STAR)
    info = tmp_path / "star_engine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: star-engine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[paceline.engines]\nstar = star_engine:StarEngine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("star_engine", None)


@pytest.mark.usefixtures("installed")
def test_an_installed_engine_carries_gradients() -> None:
    def train(group: Any) -> tuple[Any, int]:
        layer = nn.Linear(300, 300, rng=np.random.default_rng(0))
        model = paceline.DDP(layer, group)
        for step in range(3):
            x = np.random.default_rng([step, group.rank]).standard_normal((4, 300)).astype(np.float32)
            layer.weight.grad = None
            model.backward(np.ones_like(model(x)))
            layer.weight.data -= 0.1 * layer.weight.grad
        return layer.weight.data.copy(), group.bytes_sent

    (by_links, sent), _ = run_groups(local_groups(2), train)
    by_star = run_groups(local_groups(2, Config(engine="star")), train)
    for weights, sent_by_links in by_star:
        assert weights.tobytes() == by_links.tobytes(), "two addends have one sum"
        assert sent_by_links < sent / 10, "gradients went over links"


def test_the_import_error_of_an_engine_is_repeated_in_the_message(installed: Path) -> None:
    (installed / "star_engine.py").write_text("raise ImportError('there is no star: pip install star')")
    for call in (load_engine, make_engine):
        with pytest.raises(
            LinkUnavailable, match=r"'star' cannot be used, because there is no star: pip install star$"
        ):
            call("star")


def test_an_unknown_engine_is_refused_with_a_list_of_known_engines() -> None:
    with pytest.raises(ValueError, match=r"no engine 'star'; the engines are links, gloo, nccl, xccl, ucc, .*\bmpi\b"):
        Config(engine="star")
