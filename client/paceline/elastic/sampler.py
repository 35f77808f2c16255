"""Which samples a rank takes in a step: a pure function of (step, rank, world), so that the world may change any time.

n samples, global batch B, W ranks. Batch t of an epoch is perm(seed, epoch)[tB : min((t + 1) B, n)], b samples; rank r
takes [r b // W, (r + 1) b // W) of it. Nobody holds a lease on samples, so nothing has to be given back when a member
goes: the step runs again with other shares (I6).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidRank, InvalidWorldSize

__all__ = ["ElasticSampler"]


class ElasticSampler:
    """Shuffles n samples anew in every epoch and shares each global batch out.

    Args:
        n: number of samples.
        global_batch: B, samples in a step over all ranks. It does not depend on the world, so neither does training.
        seed: of the shuffling, not negative; alike on every rank.

    Attributes:
        steps_per_epoch: batches in an epoch; the last one is smaller where B does not divide n.

    Raises:
        ValueError: n or B is below 1, or the seed is negative.
    """

    def __init__(self, n: int, global_batch: int, seed: int = 0) -> None:
        if n < 1 or global_batch < 1 or seed < 0:
            raise ValueError(f"want n >= 1, global_batch >= 1 and seed >= 0, not {n}, {global_batch} and {seed}")
        self.n = n
        self.global_batch = global_batch
        self.seed = seed
        self.steps_per_epoch = -(-n // global_batch)
        self._epoch = -1
        self._order: NDArray[np.intp] = np.empty(0, np.intp)
        """perm(seed, _epoch): kept, not state."""

    def batch(self, step: int) -> NDArray[np.intp]:
        """Indices of the global batch of a step, shape [b]; steps are counted from 0 across epochs.

        Raises:
            ValueError: the step is negative.
        """
        if step < 0:
            raise ValueError(f"a step must not be negative: {step}")
        epoch, t = divmod(step, self.steps_per_epoch)
        return self._permutation(epoch)[t * self.global_batch : (t + 1) * self.global_batch].copy()

    def share(self, step: int, rank: int, world: int) -> tuple[NDArray[np.intp], float]:
        """One rank's part of a step.

        Returns:
            Indices, and their weight b_r / b for `ddp.backward(dy, weight)` with dy of the mean loss over them. A rank
            without a sample gets one index with weight 0: the mean over nothing would be NaN, and the rank must take
            part in the collectives.

        Raises:
            InvalidWorldSize: the world is below 1.
            InvalidRank: the rank is not in [0, world).
            ValueError: the step is negative.
        """
        if world < 1:
            raise InvalidWorldSize(f"a world has at least one rank, not {world}")
        if not 0 <= rank < world:
            raise InvalidRank(f"rank {rank} is not in a world of {world}", ranks=(rank,))
        batch = self.batch(step)
        mine = batch[rank * len(batch) // world : (rank + 1) * len(batch) // world]
        if not len(mine):
            return batch[:1], 0.0
        return mine, len(mine) / len(batch)

    def _permutation(self, epoch: int) -> NDArray[np.intp]:
        if epoch != self._epoch:
            # Raw bits and a stable sort, not Generator.permutation: members may run different NumPy versions, and only
            # the bit streams are promised to stay as they are. Source: NEP 19, "Random number generator policy".
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.n)
            self._order = np.argsort(bits, kind="stable")
            self._epoch = epoch
        return self._order
