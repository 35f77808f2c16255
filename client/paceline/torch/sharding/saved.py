"""What autograd keeps of parameters from the forward to the backward pass: where they lie, not what they were.

Between the passes of its unit a parameter has no memory, and in the backward pass it has other memory than before. An
operation that saves a weight, or a view of it such as `weight.t()`, would keep the whole alive. The usual way out
(FSDP in torch itself) frees and refills the storage that saved tensors refer to, with `untyped_storage().resize_`. That
cannot be done here: the memory is NumPy's, from where links read it without a copy, and storage that
`torch.from_numpy` has made, or that `Tensor.numpy()` has ever shown, is fixed in size. So a saved tensor that lies in a
parameter is replaced by its place there, and when the backward pass asks for it, it is made anew of the memory that the
parameter has then. As that memory is counted by references, nobody can ever read what is freed.

One pair of hooks counts at a time, the innermost. These are the outermost ones of the model: inside of activation
checkpointing its own count, which keep values for the moment of their use only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.torch.sharding.mirror import Mirror, mirror_in

__all__ = ["saving"]


class _Place(NamedTuple):
    """A view of a parameter."""

    mirror: Mirror
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """Any other tensor, and how often it had been written."""

    tensor: Any
    version: int


def saving(need: Callable[[Mirror], None]) -> Any:
    """For a forward pass inside the block.

    Args:
        need: called in the backward pass with a parameter that has no memory; gives it some.
    """

    def pack(tensor: Any) -> _Place | _Kept:
        mirror = mirror_in(tensor)
        if mirror is None:
            # Detached, for an operation's own output would keep the operation alive that keeps it.
            return _Kept(tensor.detach(), tensor._version)
        return _Place(mirror, tuple(tensor.size()), tensor.stride(), tensor.storage_offset())

    def unpack(saved: _Place | _Kept) -> Any:
        if isinstance(saved, _Kept):
            if saved.tensor._version != saved.version:  # torch does not check what hooks have kept
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{saved.tensor.type()} {list(saved.tensor.shape)} is at version {saved.tensor._version}; expected "
                    f"version {saved.version} instead"
                )
            return saved.tensor
        if not saved.mirror.is_here:
            need(saved.mirror)
        return saved.mirror.tensor.detach().as_strided(saved.size, saved.stride, saved.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
