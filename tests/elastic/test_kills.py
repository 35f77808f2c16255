"""SIGKILL of a worker at every phase: the others go on, nothing is used twice, and nothing is lost that another has."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic.lost import resumed_from

from support.elastic.cluster import cluster
from support.elastic.faults import kill

pytestmark = pytest.mark.slow

PHASES = ["forward", "in_word", "mid_all_reduce", "late_all_reduce", "before_gate", "behind_gate", "between_steps"]
CASES = [
    *(("ddp", 25.0, phase) for phase in PHASES),
    *(("ddp", 1e-4, phase) for phase in PHASES[1:5]),
    *(("hybrid_shard", 25.0, phase) for phase in ["in_word", "before_gate", "behind_gate"]),
    *(("hybrid_shard", 25.0, phase) for phase in ["mid_all_gather", "mid_reduce_scatter", "mid_replicas"]),
    ("no_shard", 25.0, "mid_replicas"),
]
"""Wrapper, size of a bucket in MiB, phase. Over two replicas an all_reduce has no second half. Rank 0 and rank 2 are
killed by turns: each phase has both, once with one bucket and once with many."""


@pytest.mark.parametrize(
    ("wrapper", "bucket_mb", "phase", "rank"), [(*case, number % 2 * 2) for number, case in enumerate(CASES)]
)
@pytest.mark.sampled(3)
def test_survivors_train_on_after_one_of_four_is_killed(
    wrapper: str, bucket_mb: float, phase: str, rank: int, tmp_path: Path
) -> None:
    """With one bucket of gradients, with one for each parameter, and with two replicas, each spread over two."""
    with cluster(tmp_path, least=2, most=4, total=6, wrapper=wrapper, bucket_mb=bucket_mb) as c:
        c.start(4, [kill(at=phase, rank=rank, step=3)])
        codes = c.wait()
        assert sorted(codes.values()) == [-9, 0, 0, 0], str(c)
        c.check(count=2 if wrapper == "hybrid_shard" else 3)  # where members come in nodes of two, one is spare
        assert sum(c.redone().values()) <= 1, f"more than one step was redone\n{c}"


@pytest.mark.parametrize(
    ("wrapper", "phase"),
    [
        *(("full_shard", phase) for phase in ["mid_all_gather", "behind_gate"]),
        *(("shard_grad_op", phase) for phase in ["mid_reduce_scatter", "second_word"]),
    ],
)
@pytest.mark.sampled(2)
def test_survivors_resume_from_a_checkpoint_after_a_shard_is_lost(wrapper: str, phase: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with cluster(tmp_path, least=2, most=3, total=60, pace=0.02, wrapper=wrapper, redundancy=1,
                 checkpoint_dir=str(runs), checkpoint_every=2) as c:  # fmt: skip
        c.start(3, [kill(at=phase, rank=1, once=tmp_path / "killed", stored=runs)])
        assert sorted(c.wait().values()) == [-9, 0, 0], str(c)
        c.check(count=2)
        resumed_from(c)
