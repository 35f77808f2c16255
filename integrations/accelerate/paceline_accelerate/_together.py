"""The workers in a block between steps: each evaluates some rows, all get the results, and rank 0 logs and saves."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.errors import UnsupportedOp


@dataclass(slots=True)
class Block:
    """The state of a block between steps that a worker keeps from one attempt to the next."""

    done: bool = False
    """Whether this worker has logged and saved, as rank 0."""
    number: int | None = None
    """The number of the first checkpoint that the block saves."""


@dataclass(slots=True)
class _Due:
    """A call that rank 0 makes at the end of the block."""

    do: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_log: bool = False


class Together:
    """The workers in an attempt at a block between steps: what they gather, and what rank 0 logs and saves."""

    def __init__(self, group: paceline.Group, block: Block) -> None:
        self._group = group
        self._block = block
        self._due: list[_Due] = []
        self._saves: list[str] = []
        """The folders of numbered checkpoints."""
        self._rows = self._collated = 0

    def note(self, do: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_log: bool) -> None:
        """Notes a call for rank 0."""
        self._due.append(_Due(do, args, kwargs, is_log))

    def save_numbered(self, project: Any, save: Callable[[], Any]) -> None:
        """Notes a call of `save_state` that makes a folder with the next number.

        A worker that came later does not know how many there are. So the number follows from what is there, and from
        the workers' own counts. If an attempt is interrupted, the next one has the same number.
        """
        folder = os.path.join(project.project_dir, "checkpoints")
        if not self._saves:  # in each attempt: a loss may have kept the number from some workers
            own = self._block.number
            if own is None:
                there = [int(each) for each in re.findall(r"checkpoint_(\d+)\b", " ".join(_names(folder)))]
                own = max(project.iteration, 1 + max(there, default=-1))
            self._block.number = int(self._group.all_reduce(np.array([own]), op="max", label="number")[0])
        assert self._block.number is not None
        number = self._block.number + len(self._saves)
        self._saves.append(os.path.join(folder, f"checkpoint_{number}"))

        def save_it() -> None:
            project.iteration = number
            save()

        self._due.append(_Due(save_it))

    def finish(self, *, has_applied: bool, again: bool) -> None:
        """Lets rank 0 log and save, if any worker has made the step; from here on all have made it then.

        One that has not made it itself has computed what it logs from the state before. So rank 0 logs the values of
        the lowest rank that `has_applied` it. `again` says that a worker that is gone may have begun to save.
        """
        group = self._group
        own = np.array([group.rank if has_applied else group.size])
        teller = int(group.all_reduce(own, op="min", label="accelerator-log-or-save")[0])
        if teller == group.size:
            return
        logs = [due for due in self._due if due.is_log]
        if teller > 0 and logs:
            told = group.broadcast_object([_plain([due.args, due.kwargs]) for due in logs], root=teller)
            for due, (args, kwargs) in zip(logs, told, strict=True):
                due.args, due.kwargs = args, kwargs
        if group.rank == 0 and not self._block.done:
            for folder in self._saves if again else ():
                shutil.rmtree(folder, ignore_errors=True)
            for due in self._due:
                due.do(*due.args, **due.kwargs)
            self._block.done = True

    def share(self, loader: Any, device: torch.device) -> Iterator[Any]:
        """Yields this worker's rows of each batch of a loader."""
        if getattr(loader, "batch_sampler", None) is None or isinstance(loader.dataset, IterableDataset):
            raise UnsupportedOp(
                f"{type(loader.dataset).__name__} cannot be shared out by rows: each worker can read all of it, "
                "without steps.share"
            )
        group, listed = self._group, list(loader.batch_sampler)
        # Samplers may draw their order at random: all take the one of rank 0.
        flat = group.broadcast(np.array([index for batch in listed for index in batch], np.int64), root=0)
        batches = np.split(flat, np.cumsum([len(batch) for batch in listed])[:-1])
        ends = [[len(batch) * (group.rank + each) // group.size for each in (0, 1)] for batch in batches]
        # A worker without a row takes one that does not count, so that its results have the shape of the others'.
        own = [batch[slice(*end)] if end[0] < end[1] else batch[:1] for batch, end in zip(batches, ends, strict=True)]
        workers = ("num_workers", "prefetch_factor", "multiprocessing_context", "timeout", "worker_init_fn")
        part = DataLoader(
            loader.dataset,
            batch_sampler=[indices.tolist() for indices in own],
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory and torch.cuda.is_available(),
            **{name: getattr(loader, name) for name in workers if loader.num_workers},
        )
        try:
            for batch, indices, (begin, end) in zip(part, own, ends, strict=True):
                self._rows, self._collated = end - begin, len(indices)
                yield send_to_device(batch, device)
        finally:
            self._collated = 0

    def gather(self, data: Any, use_gather_object: bool = False) -> Any:
        """Returns the rows of all workers for the present batch, in the order of the loader."""
        if not self._collated:
            raise UnsupportedOp("gather in steps.retry() needs a batch of steps.share(loader), and there is none")
        if not use_gather_object and _has_only_tensors(data):
            return recursively_apply(self._gathered, data)
        rows = list(data)
        self._check(len(rows))
        return [row for each in self._group.all_gather_object(rows[: self._rows]) for row in each]

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        self._check(len(tensor) if tensor.ndim else 0)
        rows = tensor.detach()[: self._rows].cpu().clone(memory_format=torch.contiguous_format)
        joined = self._group.all_gather(rows.view(torch.uint8).numpy(), uneven=True)  # NumPy has no bfloat16
        return torch.from_numpy(joined).view(tensor.dtype).to(tensor.device)

    def _check(self, rows: int) -> None:
        if rows != self._collated:
            raise UnsupportedOp(
                f"gather has got {rows} rows of a batch of which this worker has {self._collated}: give it one row for "
                "each row of the batch"
            )

    def reduce(self, data: Any, reduction: Literal["sum", "mean", "max", "none"] = "sum", scale: float = 1.0) -> Any:
        """Returns the sum, the mean or the maximum over the workers; `scale` has a meaning only on XLA."""
        if reduction not in ("sum", "mean", "max", "none"):
            raise UnsupportedOp(f"accelerator.reduce(reduction={reduction!r})")
        if reduction == "none":
            return data

        def reduced(tensor: torch.Tensor) -> torch.Tensor:
            values = tensor.detach().cpu()
            values = values.float() if values.dtype == torch.bfloat16 else values
            total = self._group.all_reduce(values.numpy(), op=reduction)
            return torch.from_numpy(np.asarray(total)).to(tensor.device, tensor.dtype)

        return recursively_apply(reduced, data, error_on_other_type=True)

    def pad(self, data: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pads tensors to the longest of all workers."""

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            if dim >= tensor.ndim or dim < -tensor.ndim:
                return tensor
            length = int(self._group.all_reduce(np.array([tensor.shape[dim]]), op="max")[0])
            missing = list(tensor.shape)
            missing[dim] = length - tensor.shape[dim]
            padding = tensor.new_full(missing, pad_index)
            return torch.cat([padding, tensor] if pad_first else [tensor, padding], dim)

        return recursively_apply(padded, data, error_on_other_type=True)


def _has_only_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def _names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def _plain(value: Any) -> Any:
    """Returns numbers in place of tensors and of NumPy's numbers."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.item() if isinstance(value, torch.Tensor | np.generic) else value
