"""What must be true after a long run with many faults, whoever was hit: looked up in what all trainers have told."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from support.elastic.cluster import Cluster, Trainer
from support.elastic.problem import one_process

__all__ = ["check_commits", "check_exits", "check_weights", "undone_generations"]


def check_exits(cluster: Cluster) -> None:
    """Whoever was not killed left in good order and says so."""
    for trainer in cluster.trainers:
        code = trainer.process.returncode
        assert code in (0, -9), f"{trainer.pid} ended with {code}: {trainer.of('error')}\n{trainer.stderr[-3000:]}"
        assert code or trainer.of("dismissed") or trainer.of("done"), f"{trainer.pid} ended without a word"


def check_weights(cluster: Cluster, seed: int) -> int:
    """I5: all who left at a step hold the same bits, and those of an undisturbed run; returns the last step.

    Who is dismissed from a state that is spread cannot tell all of it.
    """
    ends: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for trainer in cluster.trainers:
        for event in trainer.of("dismissed") + trainer.of("done"):
            if trainer.of("applied"):
                ends[event["step"]].append(event)
    assert ends, "nobody came to an end"
    _, expected = one_process(set(ends), seed)
    for step, events in sorted(ends.items()):
        digests = {event["digest"] for event in events}
        assert len(digests) == 1, f"{len(digests)} kinds of weights after step {step}"
        for weights in filter(None, (event["weights"] for event in events)):
            np.testing.assert_allclose(weights, expected[step], rtol=1e-7, atol=1e-9, err_msg=f"step {step}")
    return max(ends)


def check_commits(cluster: Cluster) -> None:
    """I1: a step that somebody was told is committed is attempted in no later generation."""
    commits: list[tuple[int, int, int]] = []  # generation, step, who
    for trainer in cluster.trainers:
        generation = 0
        for event in trainer.events:
            if event["event"] == "attempt":
                generation = event["generation"]
            elif event["event"] == "committed":
                commits.append((generation, event["step"], trainer.pid))
    lowest: dict[int, tuple[int, Trainer]] = {}
    for trainer in cluster.trainers:
        for event in trainer.of("attempt"):
            known = lowest.get(event["generation"])
            if known is None or event["step"] < known[0]:
                lowest[event["generation"]] = event["step"], trainer
    commits.sort()
    most, position = (0, 0, 0), 0
    for generation, (step, trainer) in sorted(lowest.items()):
        while position < len(commits) and commits[position][0] < generation:
            most = max(most, commits[position], key=lambda commit: commit[1])
            position += 1
        assert step > most[1], (
            f"step {most[1]} was committed in generation {most[0]} (pid {most[2]}), and generation {generation} "
            f"begins with step {step} (pid {trainer.pid})"
        )


def undone_generations(cluster: Cluster) -> dict[int, str]:
    """Generations in which an attempt was undone, each with why; in none may it be more than one step.

    Nor may one be undone because members disagree on what comes next: that is nobody's fault but ours.
    """
    found: dict[int, str] = {}
    for trainer in cluster.trainers:
        steps: dict[int, set[int]] = defaultdict(set)
        for event in trainer.of("undone"):
            steps[event["generation"]].add(event["step"])
            found.setdefault(event["generation"], f"step {event['step']}: {event['cause']}")
        for generation, numbers in steps.items():
            assert len(numbers) == 1, f"{trainer.pid} lost the steps {sorted(numbers)} of generation {generation}"
    disagreed = [f"generation {generation}: {why}" for generation, why in sorted(found.items()) if " called " in why]
    assert not disagreed, f"{len(disagreed)} steps were undone by disagreement, the first in {disagreed[0]}"
    return dict(sorted(found.items()))
