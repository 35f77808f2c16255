"""`PowerSGD` on a device: see `_low_rank`, whose parts of the work are divided here.

Matrix products are made on the device, of values of this rank alone. The sums of P are made orthonormal on the host,
where they are anyway between the two copies, by the code that the CPU uses. What is left is element by element, on the
device. So all ranks have the same bits, and only the directions cross.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline._parallel._low_rank import LowRankLayout
from paceline._parallel._parameter import Parameter
from paceline.torch._tensor_buckets import TensorBucket, TensorMemory
from paceline.torch._tensors import Tensor


class LowRankTensorBucket(TensorBucket):
    """A `TensorBucket` that sends `rank` directions of each matrix; see `LowRankBucket`."""

    def __init__(self, parameters: Mapping[str, Parameter], rank: int, room: int, *, feedback: bool) -> None:
        self._layout = LowRankLayout(parameters.values(), rank)
        super().__init__(parameters, room, divisible=False, feedback=feedback, travels=self._layout.first)
        self.compresses = True
        self._directions = torch.empty_like(self._own)
        """Q of the step before."""
        self.new_generation()

    def _allocate(self) -> None:
        super()._allocate()
        zeros = partial(torch.zeros, dtype=self._wire, device=self.device)
        self._second = TensorMemory(zeros(self._layout.second), np.zeros(0, self._tail_dtype), ())
        self._own = zeros(self._layout.second)
        """This rank's Q."""
        self._values = zeros(0 if self.memory.feedback else self._count)
        """Memory for `_left` if nothing is kept for feedback."""
        self._left = self._values
        """The gradients of this rank, and once they are sent what is left out of them."""

    def new_generation(self) -> None:
        """Gives all ranks, newcomers too, the same directions to begin with."""
        self._directions.copy_(torch.from_numpy(self._layout.first_directions()))

    def change(self, sums: NDArray[Any]) -> None:
        """See `TensorBucket`."""
        self._layout.orthonormalise(sums)

    def second(self) -> TensorMemory:
        """Returns, after the first reduction, the memory that the second reduction sums in place."""
        self._await_crossing()
        self.streams.wait_for(self._packed)
        with torch.no_grad():
            for matrix, p, q in self._layout.matrices(self._left, self.flat, self._second.flat).values():
                torch.matmul(matrix.T, p, out=q)
            self._own.copy_(self._second.flat)
        return self._second

    @property
    def _gradients(self) -> Tensor:
        assert self._apart is not None
        return self._apart

    def _encode(self, *, alone: bool) -> None:
        self.compresses = not alone
        if alone:
            return
        self._left = self._values
        if self.memory.feedback:
            zeros = partial(torch.zeros, device=self.device)
            kept, self._left = self.memory.residuals(self._count, self._wire, zeros)
            torch.add(self._gradients, kept, out=self._left)
        else:
            self._left.copy_(self._gradients)
        for matrix, p, q in self._layout.matrices(self._left, self.flat, self._directions).values():
            torch.matmul(matrix, q, out=p)
        for place, part in self._layout.whole():
            self.flat[part] = self._left[place]

    def _decode(self, total: float, *, divided: bool) -> None:
        assert not divided
        by = self._divisor(total)
        if not self.compresses:
            if total != 1:
                self._gradients.div_(by)
            return
        layout = self._layout
        own = layout.matrices(self._left, self.flat, self._own)
        directions = layout.matrices(self._left, self.flat, self._directions)
        for number, (matrix, p, q) in layout.matrices(self._left, self.flat, self._second.flat).items():
            kept = directions[number][2]
            kept.copy_(torch.where(torch.isfinite(q).all(), q, kept))  # q is a sum, so all ranks decide alike
            # In place, because autocast would round a product that makes a new tensor; infinities would stay for ever.
            matrix.addmm_(p, own[number][2].T, alpha=-1).nan_to_num_(0.0, 0.0, 0.0)
            mean = q / by
            found = torch.outer(p[:, 0], mean[:, 0])
            for k in range(1, layout.rank):
                found.add_(torch.outer(p[:, k], mean[:, k]))
            layout.home(self._gradients, number).copy_(found)
        for place, part in layout.whole():
            self._gradients[place] = self.flat[part] / by
            self._left[place] = 0
        self.memory.wrote()
