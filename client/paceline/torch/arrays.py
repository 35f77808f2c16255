"""The elements of any tensor, and where results go: nothing is copied where the layout allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.arrays import Array
from paceline.errors import UnsupportedOp
from paceline.torch.tensors import array_of

__all__ = ["Landing", "elements_of", "is_number", "landing"]

_KNOWN = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


class Landing(NamedTuple):
    """Where the result of an operation goes.

    Attributes:
        array: NumPy's view of it, shape [N].
        finish: brings it to the tensor, if it is not the tensor's own memory.
    """

    array: Array
    finish: Callable[[], None] | None


def is_number(dtype: Any) -> bool:
    """True if NumPy knows the type, bfloat16 included: its elements can be combined."""
    return dtype in _KNOWN or dtype == torch.bfloat16


def elements_of(tensor: Any) -> Array:
    """The elements in C order, shape [N]: a view of a contiguous tensor on the CPU, else of a copy.

    What NumPy has no type for comes as its bytes, shape [N * itemsize], uint8: it can be moved, not added up.

    Raises:
        UnsupportedOp: a sparse or quantized tensor.
    """
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedOp(f"a tensor of layout {tensor.layout} cannot travel as it is: give a dense one")
    flat = tensor.detach()
    if flat.is_cuda:
        flat = _staged(flat).copy_(flat)  # which waits for the stream
    flat = flat.resolve_conj().resolve_neg().contiguous().view(-1)
    return array_of(flat if is_number(flat.dtype) else flat.view(torch.uint8))


def landing(tensor: Any, *, filled: bool = False) -> Landing:
    """Where a result goes that is to be in this tensor.

    Args:
        tensor: dense.
        filled: the operation begins with the tensor's values (in place).
    """
    plain = not (tensor.is_cuda or tensor.is_conj() or tensor.is_neg())
    if plain and tensor.layout == torch.strided and tensor.is_contiguous():
        return Landing(elements_of(tensor), None)
    stage = _staged(tensor)
    if filled:
        stage.copy_(tensor.detach())

    def finish() -> None:
        with torch.no_grad():
            tensor.detach().copy_(stage)

    return Landing(elements_of(stage), finish)


def _staged(tensor: Any) -> Any:
    """A contiguous tensor on the CPU, of the same shape and dtype; in pinned memory for a tensor of a GPU.

    What concerns GPUs is untested, for none was at hand. Where there are some, NCCL is what to use.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
