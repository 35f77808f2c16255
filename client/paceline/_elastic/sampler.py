"""The samples of a rank in a step: a pure function of (step, rank, world), so the world may change at any time.

There are n samples, a global batch of B, and W ranks. Batch t of an epoch is perm(seed, epoch)[tB : min((t + 1) B, n)],
b samples; rank r takes [r b // W, (r + 1) b // W) of it, unless the shares follow the speeds of the ranks (`balance`).
No member reserves samples, so nothing is given back when one goes: the step runs again with other ranges (I6). The
sampler's position is part of the training state, and moves when a step is applied.

With V *microbatches*, the batch is divided into V by the same rule, whatever W is, and rank r computes those from
r V // W to (r + 1) V // W - 1: see docs/decisions/17.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline._base.numbers import checked_whole
from paceline._base.shares import Shares, range_of
from paceline.errors import InvalidRank, InvalidWorldSize

CHECK_EVERY = "sampler check_every"
"""Name of the setting that must be the same on every rank, but does not change what they compute."""


class Planned(NamedTuple):
    """The samples of one rank in one step."""

    epoch: int
    """Number of epochs that are finished before this step."""
    offset: int
    """Number of samples of the present epoch that earlier steps have used."""
    indices: NDArray[np.intp]
    """Indices of the rank's samples, as `ElasticSampler.share` returns them."""
    weight: float
    """Their weight, as `ElasticSampler.share` returns it."""


class ElasticSampler:
    """Shuffles n samples anew in every epoch, and splits each global batch between the ranks.

    Args:
        n: number of samples in an epoch.
        global_batch: B, samples in a step over all ranks. It does not depend on the world, so neither does training.
        seed: seed of the shuffling, not negative; the same on every rank.
        per_rank_batch: samples of each rank, in place of `global_batch`, so that B grows with the world. Then, and only
            then, the learning rate has to follow: `lr_scale` is W.
        microbatches: V, number of microbatches of each step (`Step.microbatches`), at least the greatest world; needs
            `global_batch`. Then a run has the same bits on any number of workers. 0 for none.
        same_bits: with microbatches, refuses members whose processor or libraries compute other bits; False admits
            them.
        check_every: K: with microbatches, one of each K-th step is computed on two or three workers, and a worker that
            computes other bits is named in a `DivergenceError`, which ends it. 0 for never.
        order: a function that returns the n indices of an epoch, from its number, in place of shuffling. It must return
            the same on every rank, at any time.

    Attributes:
        microbatches, check_every, order: as above.
        same_bits: True if members that compute other bits are refused.
        epoch: number of finished epochs. It and `offset` are part of the training state.
        offset: number of samples of the present epoch that were used.

    Raises:
        ValueError: n or B is below 1, V, K or the seed is negative, not exactly one kind of batch was given, or
            microbatches with `per_rank_batch`, or `check_every` without microbatches or without `same_bits`.
        TypeError: one of these is no whole number.
    """

    def __init__(
        self,
        n: int,
        global_batch: int | None = None,
        seed: int = 0,
        *,
        per_rank_batch: int | None = None,
        microbatches: int = 0,
        same_bits: bool = True,
        check_every: int = 0,
        order: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        if (global_batch is None) == (per_rank_batch is None):
            raise ValueError("give either global_batch or per_rank_batch")
        n, seed = checked_whole("n", n, 1), checked_whole("seed", seed, 0)
        microbatches = checked_whole("microbatches", microbatches, 0)
        check_every = checked_whole("check_every", check_every, 0)
        if per_rank_batch is None:
            size = checked_whole("global_batch", global_batch, 1)
        else:
            size = checked_whole("per_rank_batch", per_rank_batch, 1)
        if microbatches and per_rank_batch is not None:
            raise ValueError(f"microbatches={microbatches} with per_rank_batch: give global_batch")
        if check_every and not (microbatches and same_bits):
            raise ValueError(f"check_every={check_every} needs microbatches, and same_bits=True")
        self.microbatches = microbatches
        self.check_every = check_every
        self.same_bits = bool(microbatches) and same_bits
        self.n = n
        self.seed = seed
        self.order = order
        self.epoch = self.offset = 0
        self._size = size
        self._per_rank = per_rank_batch is not None
        self._orders: dict[int, NDArray[np.intp]] = {}
        """perm(seed, epoch) of the present epoch, and near its end of the next one: a cache, not state."""

    def __repr__(self) -> str:
        batch = "per_rank_batch" if self._per_rank else "global_batch"
        microbatches = f", microbatches={self.microbatches}" if self.microbatches else ""
        return f"ElasticSampler(n={self.n}, {batch}={self._size}, seed={self.seed}{microbatches})"

    @property
    def global_batch(self) -> int:
        """B, the samples of a step over all ranks.

        Raises:
            ValueError: it depends on the world, because the sampler was made with `per_rank_batch`.
        """
        if self._per_rank:
            raise ValueError("with per_rank_batch the global batch depends on the size of the world")
        return self._size

    def batch_size(self, world: int) -> int:
        """Returns the samples of a whole batch in a world of that size."""
        return self._size * world if self._per_rank else self._size

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in an epoch; the last one is smaller if B does not divide n."""
        return -(-self.n // self.global_batch)

    @property
    def settings(self) -> dict[str, object]:
        """The settings that must be the same on every rank."""
        batch = "per_rank_batch" if self._per_rank else "global_batch"
        settings: dict[str, object] = {"sampler n": self.n, f"sampler {batch}": self._size, "sampler seed": self.seed}
        if self.microbatches:  # earlier releases used this name: manifests and receipts have it
            settings |= {"sampler parts": self.microbatches, "sampler same_bits": self.same_bits}
        if self.check_every:
            settings[CHECK_EVERY] = self.check_every
        if self.order is not None:
            settings["sampler order"] = hashlib.sha256(self._permutation(0).tobytes()).hexdigest()[:16]
        return settings

    def lr_scale(self, world: int) -> float:
        """The factor for the learning rate: W with `per_rank_batch`, else 1, since B does not depend on the world."""
        return float(world) if self._per_rank else 1.0

    def current(self, rank: int, world: int, shares: Shares | None = None) -> tuple[NDArray[np.intp], float]:
        """Returns one rank's part of the present batch, like `share`; `shares` are None for equal ones."""
        return share_out(self._batch(self.epoch, self.offset, world), rank, world, shares)

    def current_microbatch(self, number: int) -> tuple[NDArray[np.intp], float]:
        """Returns one microbatch of the present batch, and its weight b_v / b; an empty one has one index of weight 0.

        Raises:
            ValueError: there is no such microbatch.
        """
        if not 0 <= number < self.microbatches:
            raise ValueError(f"microbatch {number} is none of the {self.microbatches} of a step")
        return share_out(self._batch(self.epoch, self.offset, 1), number, self.microbatches)

    def ahead(self, rank: int, world: int, shares: Shares | None = None) -> Iterator[Planned]:
        """Yields one rank's part of this batch, and of all later ones if world and shares stay as they are. Never ends.

        A loader that fetches samples early reads here what will probably come. The sampler does not move; the first
        item is what `current` returns now, and a later move of the sampler does not change the rest.
        """
        return self._walk(self.epoch, self.offset, rank, world, shares)

    def microbatches_ahead(self, numbers: Sequence[int], usual: Sequence[int]) -> Iterator[Planned]:
        """Yields microbatches of the present batch, then those of all later ones. Never ends.

        Args:
            numbers: the microbatches of the present batch.
            usual: those of each later one.
        """
        epoch, offset = self.epoch, self.offset
        while True:
            batch = self._batch(epoch, offset, 1)
            for number in numbers:
                yield Planned(epoch, offset, *share_out(batch, number, self.microbatches))
            epoch, offset = self._after(epoch, offset + len(batch))
            numbers = usual

    def advance(self, world: int) -> None:
        """Moves past the present batch, which was used in a world of that size."""
        used = len(self._batch(self.epoch, self.offset, world))
        before, (self.epoch, self.offset) = self.epoch, self._after(self.epoch, self.offset + used)
        if self.epoch != before:
            self._orders.pop(before, None)

    def state_dict(self) -> dict[str, int]:
        """Returns the sampler's position."""
        return {"epoch": self.epoch, "offset": self.offset}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Moves to a position that `state_dict` returned.

        Raises:
            ValueError: the position is out of range.
        """
        epoch, offset = int(saved["epoch"]), int(saved["offset"])
        if epoch < 0 or not 0 <= offset < self.n:
            raise ValueError(f"not a position in {self.n} samples: epoch {epoch}, offset {offset}")
        self.epoch, self.offset = epoch, offset

    def batch(self, step: int) -> NDArray[np.intp]:
        """Returns the indices of the global batch of a step, shape [b]; steps are counted from 0 across epochs.

        Raises:
            ValueError: the step is negative.
        """
        if step < 0:
            raise ValueError(f"a step must not be negative: {step}")
        epoch, t = divmod(step, self.steps_per_epoch)
        return self._permutation(epoch)[t * self.global_batch : (t + 1) * self.global_batch].copy()

    def share(self, step: int, rank: int, world: int) -> tuple[NDArray[np.intp], float]:
        """Returns one rank's part of a step.

        Returns:
            Indices, and their weight b_r / b for `ddp.backward(dy, weight)`, where dy is the gradient of the mean loss
            over them. A rank without a sample gets one index with weight 0: the mean over no samples would be NaN, and
            the rank must take part in the collectives.

        Raises:
            InvalidWorldSize: the world is below 1.
            InvalidRank: the rank is not in [0, world).
            ValueError: the step is negative.
        """
        return share_out(self.batch(step), rank, world)

    def _walk(self, epoch: int, offset: int, rank: int, world: int, shares: Shares | None) -> Iterator[Planned]:
        while True:
            batch = self._batch(epoch, offset, world)
            yield Planned(epoch, offset, *share_out(batch, rank, world, shares))
            epoch, offset = self._after(epoch, offset + len(batch))

    def _batch(self, epoch: int, offset: int, world: int) -> NDArray[np.intp]:
        return self._permutation(epoch)[offset : offset + self.batch_size(world)]

    def _after(self, epoch: int, offset: int) -> tuple[int, int]:
        """Returns the position of the next batch, once `offset` samples of the epoch are used."""
        return (epoch, offset) if offset < self.n else (epoch + 1, 0)

    def _permutation(self, epoch: int) -> NDArray[np.intp]:
        if epoch not in self._orders:
            self._orders = {other: order for other, order in self._orders.items() if abs(other - epoch) == 1}
            self._orders[epoch] = self._shuffled(epoch) if self.order is None else self._given(self.order(epoch))
        return self._orders[epoch]

    def _shuffled(self, epoch: int) -> NDArray[np.intp]:
        # Raw bits and a stable sort, not Generator.permutation: members may run different NumPy versions, and only
        # the bit streams are promised to stay as they are. Source: NEP 19, "Random number generator policy".
        bits = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(self.n)
        return np.argsort(bits, kind="stable")

    def _given(self, indices: Sequence[int]) -> NDArray[np.intp]:
        given = np.array(indices, np.intp)
        if given.shape != (self.n,):
            raise ValueError(f"order(epoch) must return {self.n} indices, and has returned {given.shape}")
        return given


def share_out(
    batch: NDArray[np.intp], rank: int, world: int, shares: Shares | None = None
) -> tuple[NDArray[np.intp], float]:
    """Returns one rank's part of a global batch, shape [b] with b >= 1, like `ElasticSampler.share`."""
    if world < 1:
        raise InvalidWorldSize(f"a world has at least one rank, not {world}")
    if not 0 <= rank < world:
        raise InvalidRank(f"rank {rank} is not in a world of {world}", ranks=(rank,))
    mine = batch[slice(*range_of(rank, world, len(batch), shares))]
    if not len(mine):
        return batch[:1].copy(), 0.0
    return mine.copy(), len(mine) / len(batch)
