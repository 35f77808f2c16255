"""Microbatches with FSDP: whoever is killed, joins or leaves, the last state has the bits of one process with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.elastic.same_bits import check_bits, come_and_go, in_microbatches

pytestmark = pytest.mark.slow


def saving(folder: Path) -> dict[str, Any]:
    return {"checkpoint_dir": str(folder / "runs"), "checkpoint_every": 1}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_kills_joins_and_leaves_keep_the_bits(strategy: str, tmp_path: Path) -> None:
    """The others have a copy of the dead one's shard: there is no checkpoint."""
    come_and_go(f"mlp/{strategy}", tmp_path, reference="mlp", total=26, digest_every=2)


def test_nodes_that_join_and_leave_keep_the_bits(tmp_path: Path) -> None:
    """The world has 4, 2, 4 and 2 members."""
    come_and_go(
        "mlp/hybrid_shard",
        tmp_path,
        begin=4,
        join=1,
        least=2,
        worlds=(2, 4),
        reference="mlp",
        total=26,
        **saving(tmp_path),
    )


def test_other_worlds_resume_from_a_sharded_checkpoint(tmp_path: Path) -> None:
    first = 0
    for world, stop_at in ((4, 4), (1, 8), (3, 0)):
        (tmp_path / f"{world}").mkdir()
        with in_microbatches(tmp_path / f"{world}", "mlp/full_shard", total=12, **saving(tmp_path)) as c:
            c.start(world, stop_at=stop_at)
            assert set(c.wait().values()) == {0}, str(c)
            assert check_bits(c, tmp_path, "mlp") == (stop_at or 12)
            before, first = first, min(event["step"] for trainer in c.trainers for event in trainer.of("applied"))
            assert first > before, f"it began anew\n{c}"
