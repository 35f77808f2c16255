"""`ElasticValidation`: the workers share out the batches of a validation, and all get the values of all of them."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops import _EvaluationLoop
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline_lightning._shared_values import Gains

_COLLECTING = ("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end")
"""Hooks of a module that may put together more than what it logs and its metrics: the outputs of batches."""


class ElasticValidation(_EvaluationLoop):  # type: ignore[misc]  # Lightning's types are not checked here
    """Lightning's validation in `fit`, over this worker's batches if all workers validate in the same step."""

    _combined_loader: Any
    _max_batches: Any
    _whole: tuple[Any, Any] | None = None
    """The loaders and their numbers of batches, while this worker goes through its part of them."""

    @classmethod
    def of(cls, loop: Any) -> Self:
        """Returns a loop in place of Lightning's own, with its settings and progress."""
        new = cls.__new__(cls)
        new.__dict__.update(vars(loop))
        return new

    def reset(self) -> None:
        """Begins a validation."""
        strategy = self.trainer.strategy
        if strategy.together and self._can_share():
            for loader in self._combined_loader.flattened:
                _set_sampler_epoch(loader, self.trainer.fit_loop.epoch_progress.current.processed)
            group = strategy.session.group
            self._whole = self._combined_loader, self._max_batches
            shares = [
                _share(group, loader, count)
                for loader, count in zip(self._combined_loader.flattened, self._max_batches, strict=True)
            ]
            self._weights = [float(counts) for _, counts in shares]
            self._combined_loader = CombinedLoader([loader for loader, _ in shares], "sequential")
            self._max_batches = [len(loader) for loader, _ in shares]
            self._gains = Gains(self._results, strategy._metrics)
        super().reset()

    def _can_share(self) -> bool:
        module, wanted = self.trainer.lightning_module, self.trainer.strategy.share_validation
        if wanted is False:
            return False
        if wanted is None and any(is_overridden(hook, module) for hook in _COLLECTING):
            return False
        if wanted is None and any(map(_collects, self.trainer.callbacks)):
            return False
        return self._is_sequential and all(
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__
            and loader.batch_sampler is not None
            and not isinstance(loader.dataset, IterableDataset)
            and count > 0
            for loader, count in zip(self._combined_loader.flattened, self._max_batches, strict=True)
        )

    def _store_dataloader_outputs(self) -> None:
        """Ends the part of one loader: now all workers get the values of all."""
        if self._whole is not None:
            strategy = self.trainer.strategy
            self._gains.share(strategy.session.group, self._weights.pop(0))
            self._gains = Gains(self._results, strategy._metrics)
        super()._store_dataloader_outputs()

    def on_run_end(self) -> Any:
        """Ends a validation."""
        if self._whole is not None:
            own, (self._combined_loader, self._max_batches) = sum(self._max_batches), self._whole
            self._whole = None
            self.batch_progress.increment_by(int(sum(self._max_batches)) - own, True)
        return super().on_run_end()

    def leave(self) -> None:
        """Tidies up, also after a validation that was interrupted."""
        if self._whole is not None:
            self._combined_loader, self._max_batches = self._whole
            self._whole = None
        if self.trainer.validating:
            self._on_evaluation_model_train()
            self._results.clear()
            self.trainer.training = True


def _collects(callback: Any) -> bool:
    """Returns whether a callback that is not Lightning's own gets the outputs of batches."""
    kind = type(callback)
    return not kind.__module__.startswith("lightning.") and (
        kind.on_validation_batch_end is not Callback.on_validation_batch_end
    )


def _share(group: paceline.Group, loader: Any, limit: float) -> tuple[Any, bool]:
    """Returns a loader of this worker's batches, and whether they count: a worker without any gets one that does not.

    Samplers may draw at random, so all take the batches of rank 0's.
    """
    listed = list(loader.batch_sampler)[: int(limit)]
    flat = group.broadcast(np.array([index for batch in listed for index in batch], np.int64), root=0)
    batches = [part.tolist() for part in np.split(flat, np.cumsum([len(batch) for batch in listed])[:-1])]
    begin, end = (len(batches) * (group.rank + each) // group.size for each in (0, 1))
    part = DataLoader(
        loader.dataset,
        batch_sampler=batches[begin:end] or batches[:1],
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    return part, begin < end
