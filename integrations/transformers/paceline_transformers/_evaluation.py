"""Evaluates together: each worker takes some of the batches, and all get the results of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import DataLoader, Subset
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize

import paceline

_PADDING = -100
"""The Trainer pads predictions and labels with this value."""


def can_share(trainer: Any, loader: Any) -> bool:
    """Returns True if an evaluation can be shared out; else each worker evaluates all by itself."""
    if getattr(loader, "batch_sampler", None) is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return False
    args = trainer.args
    return bool(args.eval_do_concat_batches and not args.batch_eval_metrics and len(loader.dataset))


def evaluate_together(
    trainer: Any,
    group: paceline.Group,
    evaluate: Callable[..., EvalLoopOutput],
    loader: Any,
    description: str,
    prediction_loss_only: bool | None = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> EvalLoopOutput:
    """Returns what `evaluate`, the Trainer's `evaluation_loop`, returns for all batches of the loader.

    Collectives: a few for each array of the predictions.
    """
    batches = _batches(group, loader)
    begin, end = (len(batches) * (group.rank + each) // group.size for each in (0, 1))
    mine = batches[begin:end] or batches[:1]  # a worker without a batch learns from one how results look
    indices = [index for batch in mine for index in batch]
    part = DataLoader(
        Subset(loader.dataset, indices),
        batch_size=len(batches[0]),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )
    part = prepare_data_loader(part, trainer.args.device, num_processes=1, process_index=0, put_on_device=True)
    with _collecting(trainer) as (found, losses):
        output = evaluate(part, description, prediction_loss_only, ignore_keys, metric_key_prefix)
    rows = len(indices) if begin < end else 0
    if found:
        seen = found[0]
        joined = _joined(group, (seen.predictions, seen.label_ids, seen.inputs, seen.losses), rows)
        metrics = denumpify_detensorize(trainer.compute_metrics(EvalPrediction(*joined)))
        predictions, labels = joined[:2]
    else:
        predictions, labels = _joined(group, (output.predictions, output.label_ids), rows)
        metrics = {}
    metrics = {_prefixed(name, metric_key_prefix): value for name, value in metrics.items()}
    if losses:  # the Trainer takes the mean over samples, each with the loss of its batch
        own = np.repeat(np.array(losses, np.float32), [len(batch) for batch in mine])[:rows]
        every = group.all_gather(own, uneven=True)
        finite = np.isfinite(every)
        if trainer.args.logging_nan_inf_filter and finite.any():
            every = every[finite]
        metrics[f"{metric_key_prefix}_loss"] = every.mean().item()
    return EvalLoopOutput(predictions, labels, {**output.metrics, **metrics}, sum(map(len, batches)))


def _batches(group: paceline.Group, loader: Any) -> list[list[int]]:
    """Returns the samples of each batch as rank 0's sampler gives them: samplers may draw them at random."""
    listed = list(loader.batch_sampler)
    flat = group.broadcast(np.array([index for batch in listed for index in batch], np.int64), root=0)
    ends = np.cumsum([len(batch) for batch in listed])[:-1]
    return [part.tolist() for part in np.split(flat, ends)]


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"


@contextlib.contextmanager
def _collecting(trainer: Any) -> Iterator[tuple[list[EvalPrediction], list[float]]]:
    """Inside the block, the Trainer keeps what it would compute metrics from, and the loss of each batch."""
    found: list[EvalPrediction] = []
    losses: list[float] = []
    compute, predict, own = trainer.compute_metrics, trainer.prediction_step, "prediction_step" in vars(trainer)

    def keep(prediction: EvalPrediction) -> dict[str, float]:
        found.append(prediction)
        return {}

    def keep_loss(*args: Any, **kwargs: Any) -> Any:
        result = predict(*args, **kwargs)
        if result[0] is not None:
            losses.append(float(result[0]))
        return result

    trainer.prediction_step = keep_loss
    if compute is not None:
        trainer.compute_metrics = keep
    try:
        yield found, losses
    finally:
        trainer.compute_metrics = compute
        if own:
            trainer.prediction_step = predict
        else:
            del trainer.prediction_step


def _joined(group: paceline.Group, tree: Any, rows: int) -> Any:
    """Joins nested arrays of all workers on axis 0, of which this one gives `rows`; axis 1 is padded to the widest."""
    leaves, structure = tree_flatten(tree)
    arrays = [leaf if rows else leaf[:0] for leaf in leaves if leaf is not None]
    if not arrays:
        return tree
    own = np.array([array.shape[1] if array.ndim > 1 else 0 for array in arrays])
    widths = group.all_reduce(own, op="max", label="widths").tolist()
    joined = iter(
        [group.all_gather(_padded(array, width), uneven=True) for array, width in zip(arrays, widths, strict=True)]
    )
    return tree_unflatten([None if leaf is None else next(joined) for leaf in leaves], structure)


def _padded(array: Any, width: int) -> Any:
    if array.ndim < 2 or array.shape[1] == width:
        return np.ascontiguousarray(array)
    edges = [(0, width - array.shape[1] if axis == 1 else 0) for axis in range(array.ndim)]
    return np.pad(array, edges, constant_values=_PADDING)
