"""Which samples the steps that count were made of, from what every worker told of every attempt. Pure.

A worker tells which samples it takes before it computes, and whether the step was applied afterwards. So the samples of
a worker that dies are known, and whether they count is for the others to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Ledger"]


@dataclass(slots=True)
class Ledger:
    """The records of one run.

    A step may be attempted in several generations; it counts in the greatest one in which anybody applied it. What was
    taken in the others was undone.
    """

    _taken: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By (step, generation): samples of all workers, each as often as it was taken."""
    _counts: dict[int, int] = field(default_factory=dict)
    """By step: the generation in which it counts."""
    _losses: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    """By (step, generation): sum of the samples' losses, and of how many, as far as was told."""

    @property
    def generations(self) -> int:
        """In how many generations some step counts."""
        return len(set(self._counts.values()))

    def took(self, step: int, generation: int, samples: Sequence[int]) -> None:
        """A worker begins an attempt with these samples."""
        self._taken.setdefault((step, generation), []).extend(samples)

    def applied(self, step: int, generation: int, loss: float, samples: int) -> None:
        """A worker has applied a step; `loss` is the mean over its samples, of which there may be none."""
        self._counts[step] = max(generation, self._counts.get(step, 0))
        total, count = self._losses.get((step, generation), (0.0, 0))
        self._losses[step, generation] = total + loss * samples if samples else total, count + samples

    def mean_loss(self, steps: range) -> float | None:
        """Mean training loss over the samples of some steps that count, as far as was told; None if none was."""
        told = [self._losses[step, self._counts[step]] for step in steps if step in self._counts]
        samples = sum(count for _, count in told)
        return sum(total for total, _ in told) / samples if samples else None

    def samples_once(self, *, samples: int, steps_per_epoch: int, total: int) -> bool:
        """True if the steps 1 to `total` used every sample exactly once in every epoch.

        Args:
            samples: how many there are.
            steps_per_epoch: how many steps go through all of them.
            total: steps of the run; whole epochs.
        """
        if total < 1 or steps_per_epoch < 1 or total % steps_per_epoch:
            return False
        for first in range(1, total + 1, steps_per_epoch):
            used: list[int] = []
            for step in range(first, first + steps_per_epoch):
                if step not in self._counts:
                    return False
                used += self._taken.get((step, self._counts[step]), ())
            if len(used) != samples or sorted(used) != list(range(samples)):
                return False
        return True
