"""What must be true where a part of a spread state was lost: the line went on from a checkpoint."""

from __future__ import annotations

import re

from support.elastic.cluster import Cluster

__all__ = ["resumed_from"]


def resumed_from(cluster: Cluster) -> int:
    """The step of the checkpoint from which the line went on; call it when all have ended.

    Raises:
        AssertionError: nothing was lost, or whoever had a place in the line went on somewhere else.
    """
    said = "".join(trainer.stderr for trainer in cluster.finishers)
    steps = {int(step) for step in re.findall(r"is lost: .*; continuing from step (\d+) of checkpoint", said)}
    assert len(steps) == 1, f"checkpoints from which the line went on: {steps}\n{cluster}"
    (step,) = steps
    killed = [trainer for trainer in cluster.trainers if trainer.process.returncode == -9]
    lost = max(trainer.of("attempt")[-1]["generation"] for trainer in killed)
    reached = max(trainer.of("attempt")[-1]["step"] for trainer in killed)
    assert 0 < step < reached, f"from step {step}, and {reached} was tried\n{cluster}"
    for trainer in cluster.finishers:
        first = next(event["step"] for event in trainer.of("attempt") if event["generation"] > lost)
        assert first == step + 1, f"{trainer.pid} went on with step {first}\n{cluster}"
    return step
