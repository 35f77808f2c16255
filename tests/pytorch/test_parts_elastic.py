"""Parts with torch: through kills, joins and leaves each step has the bits of one undisturbed process."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.same_bits import BitsSoak, come_and_go, find_the_one_that_flips

pytestmark = [pytest.mark.torch, pytest.mark.slow]

MODELS = ["cnn", pytest.param("characters", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("model", MODELS)
def test_workers_are_killed_join_and_leave(model: str, tmp_path: Path) -> None:
    come_and_go(model, tmp_path)


def test_a_worker_that_flips_a_bit_of_its_gradients_is_named(tmp_path: Path) -> None:
    find_the_one_that_flips("cnn", tmp_path)


def test_sharded_models_are_killed_join_and_leave(tmp_path: Path) -> None:
    """Where the dead one's shard is lost, the others go on from a checkpoint."""
    saved = {"checkpoint_dir": str(tmp_path / "runs"), "checkpoint_every": 1}
    come_and_go("cnn/full_shard", tmp_path, total=26, **saved)


@pytest.mark.exhaustive
def test_sharded_nodes_come_and_go(tmp_path: Path) -> None:
    saved = {"checkpoint_dir": str(tmp_path / "runs"), "checkpoint_every": 1}
    come_and_go("cnn/hybrid_shard", tmp_path, begin=4, join=1, least=2, worlds=(2, 4), total=26, **saved)


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
@pytest.mark.parametrize("model", ["cnn", "characters"])
def test_half_a_minute_in_a_storm(model: str, tmp_path: Path) -> None:
    BitsSoak(model, 30, print).run(1, tmp_path)
