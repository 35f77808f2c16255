"""What must be true of local training in an elastic job, whoever came and went."""

from __future__ import annotations

import numpy as np
from pytorch.local_training.problem import Part, Reference

from support.elastic.cluster import Cluster

__all__ = ["SEED", "TRAINER", "check", "check_bits"]

SEED = 5
TRAINER = "pytorch/local_training/trainer.py"
"""For the plan of a cluster."""


def check(cluster: Cluster, *, lr: float, momentum: float) -> None:
    """I5 and I6, and the parameters that one process finds which runs each round of the line once, as it was shared."""
    check_bits(cluster)
    reference = Reference(SEED, lr, momentum)
    for step, generation in sorted(cluster.line().items()):
        reference.round(
            [
                Part(
                    trainer.pid,
                    event["batches"],
                    event["weight"],
                    kept=any((e["step"], e["generation"]) == (step, generation) for e in trainer.of("applied")),
                )
                for trainer in cluster.trainers
                for event in trainer.of("attempt")
                if (event["step"], event["generation"]) == (step, generation)
            ]
        )
    expected = np.concatenate([reference.parameters, reference.velocity] if momentum else [reference.parameters])
    found = cluster.finishers[0].of("done")[0]["weights"]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12, err_msg=str(cluster))


def check_bits(cluster: Cluster) -> None:
    """I5 and I6."""
    ends = [trainer.of("done")[0] for trainer in cluster.finishers]
    assert ends, f"nobody came to the end\n{cluster}"
    assert len({end["digest"] for end in ends}) == 1, f"global parameters differ\n{cluster}"
    for end in ends:
        assert end["step"] == cluster.total
        assert end["net"] == end["weights"][: len(end["net"])], "the net does not hold the global parameters"
    cluster.check_samples(cluster.total)
