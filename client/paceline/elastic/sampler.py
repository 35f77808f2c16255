"""Which samples a rank takes in a step: a pure function of (step, rank, world), so that the world may change any time.

n samples, global batch B, W ranks. Batch t of an epoch is perm(seed, epoch)[tB : min((t + 1) B, n)], b samples; rank r
takes [r b // W, (r + 1) b // W) of it. Nobody holds a lease on samples, so nothing has to be given back when a member
goes: the step runs again with other shares (I6). The sampler's position is part of the training state, and moves when a
step is applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidRank, InvalidWorldSize

__all__ = ["ElasticSampler", "Planned", "share_out"]


class Planned(NamedTuple):
    """What one rank takes in one step."""

    epoch: int
    """Epochs that are through by then."""
    offset: int
    """Samples of this epoch that earlier steps have used."""
    indices: NDArray[np.intp]
    """The rank's samples, as of `ElasticSampler.share`."""
    weight: float
    """Their weight, as of `ElasticSampler.share`."""


class ElasticSampler:
    """Shuffles n samples anew in every epoch and shares each global batch out.

    Args:
        n: number of samples.
        global_batch: B, samples in a step over all ranks. It does not depend on the world, so neither does training.
        seed: of the shuffling, not negative; alike on every rank.
        per_rank_batch: in place of `global_batch`: samples of each rank, so that B grows with the world. Then, and only
            then, the learning rate has to follow: `lr_scale` is W.

    Attributes:
        epoch: where the sampler is: epochs that are through,
        offset: and samples of the next one that are. Both are part of the training state.

    Raises:
        ValueError: n or B is below 1, the seed is negative, or not exactly one kind of batch was given.
    """

    def __init__(
        self, n: int, global_batch: int | None = None, seed: int = 0, *, per_rank_batch: int | None = None
    ) -> None:
        if (global_batch is None) == (per_rank_batch is None):
            raise ValueError("want either global_batch or per_rank_batch")
        size = global_batch if per_rank_batch is None else per_rank_batch
        assert size is not None
        if n < 1 or size < 1 or seed < 0:
            raise ValueError(f"want n >= 1, a batch >= 1 and seed >= 0, not {n}, {size} and {seed}")
        self.n = n
        self.seed = seed
        self.epoch = self.offset = 0
        self._size = size
        self._per_rank = per_rank_batch is not None
        self._orders: dict[int, NDArray[np.intp]] = {}
        """perm(seed, epoch) of the epoch that is looked at, and near its end of the next one: kept, not state."""

    @property
    def global_batch(self) -> int:
        """B.

        Raises:
            ValueError: it depends on the world, for the sampler was made with `per_rank_batch`.
        """
        if self._per_rank:
            raise ValueError("with per_rank_batch the global batch is that times the world")
        return self._size

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch; the last one is smaller where B does not divide n."""
        return -(-self.n // self.global_batch)

    @property
    def settings(self) -> dict[str, object]:
        """What must be alike on every rank."""
        batch = "per_rank_batch" if self._per_rank else "global_batch"
        return {"sampler n": self.n, f"sampler {batch}": self._size, "sampler seed": self.seed}

    def lr_scale(self, world: int) -> float:
        """What to multiply the learning rate by: W with `per_rank_batch`, else 1, for B is the same in any world."""
        return float(world) if self._per_rank else 1.0

    def current(self, rank: int, world: int) -> tuple[NDArray[np.intp], float]:
        """One rank's part of the batch that the sampler is at; as `share`."""
        return share_out(self._batch(self.epoch, self.offset, world), rank, world)

    def ahead(self, rank: int, world: int) -> Iterator[Planned]:
        """One rank's part of the batch that the sampler is at, and of all that follow if the world stays as it is.

        Without end, and nothing moves: whoever fetches samples early looks here for what is likely to come. The first
        item is what `current` gives now; a sampler that moves later does not change the rest.
        """
        return self._walk(self.epoch, self.offset, rank, world)

    def advance(self, world: int) -> None:
        """The batch that the sampler is at was used, in a world of that size."""
        used = len(self._batch(self.epoch, self.offset, world))
        before, (self.epoch, self.offset) = self.epoch, self._after(self.epoch, self.offset + used)
        if self.epoch != before:
            self._orders.pop(before, None)

    def state_dict(self) -> dict[str, int]:
        """Where the sampler is."""
        return {"epoch": self.epoch, "offset": self.offset}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes there.

        Raises:
            ValueError: there is no such place.
        """
        epoch, offset = int(saved["epoch"]), int(saved["offset"])
        if epoch < 0 or not 0 <= offset < self.n:
            raise ValueError(f"no place in {self.n} samples: epoch {epoch}, offset {offset}")
        self.epoch, self.offset = epoch, offset

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
        return share_out(self.batch(step), rank, world)

    def _walk(self, epoch: int, offset: int, rank: int, world: int) -> Iterator[Planned]:
        while True:
            batch = self._batch(epoch, offset, world)
            yield Planned(epoch, offset, *share_out(batch, rank, world))
            epoch, offset = self._after(epoch, offset + len(batch))

    def _batch(self, epoch: int, offset: int, world: int) -> NDArray[np.intp]:
        size = self._size * world if self._per_rank else self._size
        return self._permutation(epoch)[offset : offset + size]

    def _after(self, epoch: int, offset: int) -> tuple[int, int]:
        """Where the next batch begins, if so many samples of the epoch are used."""
        return (epoch, offset) if offset < self.n else (epoch + 1, 0)

    def _permutation(self, epoch: int) -> NDArray[np.intp]:
        if epoch not in self._orders:
            self._orders = {other: order for other, order in self._orders.items() if abs(other - epoch) == 1}
            # Raw bits and a stable sort, not Generator.permutation: members may run different NumPy versions, and only
            # the bit streams are promised to stay as they are. Source: NEP 19, "Random number generator policy".
            bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.n)
            self._orders[epoch] = np.argsort(bits, kind="stable")
        return self._orders[epoch]


def share_out(batch: NDArray[np.intp], rank: int, world: int) -> tuple[NDArray[np.intp], float]:
    """One rank's part of a global batch, shape [b] with b >= 1; as `ElasticSampler.share`."""
    if world < 1:
        raise InvalidWorldSize(f"a world has at least one rank, not {world}")
    if not 0 <= rank < world:
        raise InvalidRank(f"rank {rank} is not in a world of {world}", ranks=(rank,))
    mine = batch[rank * len(batch) // world : (rank + 1) * len(batch) // world]
    if not len(mine):
        return batch[:1].copy(), 0.0
    return mine.copy(), len(mine) / len(batch)
