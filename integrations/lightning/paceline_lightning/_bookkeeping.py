"""The Trainer's counters, callbacks and logged values as a part of the training state.

They are undone with a step, and newcomers take them over.
"""

from __future__ import annotations

import builtins
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor
from torchmetrics import Metric

from paceline.errors import UnsupportedOp
from paceline_lightning._shared_values import metric_states

_OF_CHECKPOINTS = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes of a checkpoint callback that it leaves out of its state; some are not in all releases."""

_OF_LOGS = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_first_loop_iter", "_current_fx")

_OF_RESULTS = ("has_reset", "_forward_cache", "_update_count", "_computed")

_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


class Bookkeeping:
    """The counters of the loops, the callbacks, logged values, torchmetrics, and the work that waits in `Later`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._metrics = [module for module in trainer.lightning_module.modules() if isinstance(module, Metric)]
        self._counters = list(_counters(trainer.fit_loop))
        self.finished = False
        """Whether the last step was made."""

    def state_dict(self) -> dict[str, Any]:
        """Returns all of it, as nested values and tensors."""
        trainer = self._trainer
        loops = trainer.fit_loop
        return {
            "finished": self.finished,
            "stops": trainer.strategy.stops,
            "skips_validation": loops.epoch_loop._skip_next_val,
            "counters": [list(_numbers(counter).values()) for counter in self._counters],
            "batches_that_stepped": loops.epoch_loop._batches_that_stepped,
            "validated": sorted(loops.epoch_loop.val_loop._seen_batches_per_dataloader.items()),
            "callbacks": {
                callback.state_key: {"state": callback.state_dict(), "more": _more(callback)}
                for callback in trainer.callbacks
                if not isinstance(callback, Timer)  # whose state is a clock
            },
            "logs": {name: getattr(trainer._logger_connector, name) for name in _OF_LOGS},
            "results": {key: _saved(result) for key, result in loops.epoch_loop._results.items()},
            "metrics": [list(each) for each in metric_states(self._metrics)],
            "versions": [vars(logger).get("_version") for logger in trainer.loggers],
            "later": trainer.strategy.later.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Puts everything back."""
        trainer = self._trainer
        loops = trainer.fit_loop
        self.finished, trainer.strategy.stops = saved["finished"], saved["stops"]
        for counter, values in zip(self._counters, saved["counters"], strict=True):
            vars(counter).update(zip(_numbers(counter), values, strict=True))
        loops.epoch_loop._batches_that_stepped = saved["batches_that_stepped"]
        loops.epoch_loop.val_loop._seen_batches_per_dataloader = defaultdict(int, map(tuple, saved["validated"]))
        loops.epoch_loop._skip_next_val = saved["skips_validation"]
        for logger, version in zip(trainer.loggers, saved["versions"], strict=True):
            if version is not None and getattr(logger, "_experiment", None) is None:
                logger._version = version
        for callback in trainer.callbacks:
            if isinstance(callback, Timer):
                continue
            if callback.state_key not in saved["callbacks"]:
                raise UnsupportedOp(f"this worker has the callback {type(callback).__name__}, and others have not")
            told = saved["callbacks"][callback.state_key]
            for name, value in told["more"].items():
                setattr(callback, name, value)
            if told["state"]:
                callback.load_state_dict(told["state"])
        for name, value in saved["logs"].items():
            setattr(trainer._logger_connector, name, value)
        results = loops.epoch_loop._results
        mine = dict(results)
        results.clear()
        for key, value in saved["results"].items():
            meta = mine[key].meta if key in mine else _meta(value, trainer.strategy)
            results[key] = _restored(value, meta, trainer.lightning_module)
        for metric, (count, states) in zip(self._metrics, saved["metrics"], strict=True):
            metric._update_count, metric._computed = count, None
            for name, value in states.items():
                moved = (
                    [each.to(metric.device) for each in value] if isinstance(value, list) else value.to(metric.device)
                )
                setattr(metric, name, moved)
        trainer.strategy.later.load_state_dict(saved["later"])


def _more(callback: Any) -> dict[str, Any]:
    """Returns attributes that a callback's state lacks. Without the right `dirpath` it would not load the rest."""
    names = ("dirpath", *_OF_CHECKPOINTS)
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def _counters(thing: Any) -> Iterator[Any]:
    """Yields the counters of a loop and of those in it. Its own `state_dict` takes ten times as long."""
    for inner in vars(thing).values():
        if isinstance(inner, _Loop | _BaseProgress):
            yield from _counters(inner)
    if isinstance(thing, _BaseProgress):
        yield thing


def _numbers(counter: Any) -> dict[str, int]:
    return {name: value for name, value in vars(counter).items() if isinstance(value, int)}


def _saved(result: Any) -> dict[str, Any]:
    """Returns a logged value with all that it is made of."""
    meta = result.meta
    told = {name: getattr(meta, name) for name in _FIELDS}
    told |= {"dataloader_idx": meta.dataloader_idx, "metric_attribute": meta.metric_attribute}
    sync = {"_should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}
    values = {name: getattr(result, name) for name in _OF_RESULTS}
    if result.is_tensor:
        values |= {name: getattr(result, name) for name in result._defaults}
    return {
        "is_tensor": result.is_tensor,
        "meta": told,
        "reduce_fx": [meta.reduce_fx.__module__ == "builtins", meta.reduce_fx.__name__],
        "sync": sync,
        "values": {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()},
    }


def _meta(saved: Mapping[str, Any], strategy: Any) -> Any:
    """Returns how a value is logged, as Lightning notes it when that is first asked for."""
    is_builtin, name = saved["reduce_fx"]
    meta = _Metadata(**saved["meta"], reduce_fx=getattr(builtins if is_builtin else torch, name))
    meta.sync = _Sync(fn=strategy.reduce, **saved["sync"])
    return meta


def _restored(saved: Mapping[str, Any], meta: Any, module: Any) -> Any:
    result = _ResultMetric(meta, saved["is_tensor"])
    for name, value in saved["values"].items():
        setattr(result, name, value)
    if not result.is_tensor:
        result.value = operator.attrgetter(meta.metric_attribute)(module)
        return result
    return result.to(module.device)
