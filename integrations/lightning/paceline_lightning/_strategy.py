"""`PacelineStrategy`: a worker's device, its place among the workers, and how losses and gradients are averaged."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.callbacks.progress import ProgressBar
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.wrappers import MetricTracker, Running

import paceline
import paceline.torch
from paceline.errors import StepOrderError, UnsupportedOp
from paceline_lightning._fit_loop import ElasticFitLoop
from paceline_lightning._later import Later, open_logger
from paceline_lightning._shared_values import Gains

_IN_NO_VIEW = 1
"""The rank of a worker that has not joined, or is in no view: it neither logs nor saves."""

_OWN_UPDATES = {
    "BaseFinetuning",
    "BatchSizeFinder",
    "LearningRateFinder",
    "ModelPruning",
    "StochasticWeightAveraging",
    "WeightAveraging",
}
"""Callbacks, by name since not all releases have them."""

_LOCK = "~/.cache/paceline/preparing-data"

_fitted: list[bool] = []
"""Has an entry once `fit` was called in this process."""


class PacelineStrategy(SingleDeviceStrategy):  # type: ignore[misc]  # Lightning's types are not checked here
    """Trains on workers that may die, join and leave: `Trainer(strategy="paceline")` after `import paceline_lightning`.

    A step has the samples of one process, the loader's batch size times `accumulate_grad_batches`, however many workers
    there are: they share out each batch. So the learning rate, the number of steps and the losses match the same
    script without Paceline. `fit` joins the job, and leaves it at its end. Outside of `fit`, as in `test` after it,
    each worker works alone. Each worker has one device; those of a host take one each of `Trainer(devices=...)`.

    Args:
        share_validation: True if the workers share out the batches of a validation, and then put together what was
            logged and all torchmetrics. None to do so unless the module has hooks for the end of an epoch or of a batch
            of validation, or callbacks have, which may collect more than that; False for each worker to validate all.
            Streams are never shared out.
        accelerator, checkpoint_io, precision_plugin: as for Lightning's strategies.
    """

    strategy_name = "paceline"

    def __init__(
        self,
        share_validation: bool | None = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.share_validation = share_validation
        self.parallel_devices: list[torch.device] | None = None  # the Trainer sets it
        self.session: paceline.Session | None = None
        self.global_rank: int = int(os.environ.get("PACELINE_LOCAL_RANK", "0"))
        self.later = Later(super().remove_checkpoint)
        """Work of rank 0 that waits until the present step is committed."""
        self.part: paceline.torch.BatchPart | None = None
        """The batch that is going through the module."""
        self.together = False
        """Whether the workers validate and save together in this step, which is undone if one of them is lost then."""
        self.step: paceline.Step | None = None
        self.stops = False
        """Whether training is to stop as soon as it may, as all workers know; a part of the training state."""
        self._wants_stop = False
        """Whether this worker has been told to stop."""
        self._metrics: list[Metric] = []
        self.has_updated = False
        """Whether an optimizer has made an update in this pass."""
        self.has_begun = False
        """Whether training has begun, so that progress bars are there."""
        self._rank_alone = 0
        self._gains: Any = None
        self._batch_rows = 0
        self._result: Any = None
        self._replicated: Any = None

    # The place of this worker -----------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        devices = self.parallel_devices or [self._root_device]
        return devices[int(os.environ.get("PACELINE_LOCAL_RANK", "0")) % len(devices)]

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker logs and saves."""
        return bool(self.global_rank == 0)

    @property
    def trainer(self) -> Any:
        """The Trainer whose module this strategy trains."""
        return self.lightning_module.trainer

    def setup_environment(self) -> None:
        """Prepares `fit`; the Trainer calls it before the hooks that set up data and module."""
        super().setup_environment()
        trainer = self.trainer
        self._rank_alone = int(rank_zero_only.rank)
        self._take_rank(self._rank_alone)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._refuse()
        self.stops = self._wants_stop = self.has_begun = False
        if "PACELINE_COORDINATOR" in os.environ:
            if _fitted:
                raise StepOrderError(
                    f"fit() was called again in pid {os.getpid()}, whose job is done: start a run for each"
                )
            self._take_rank(_IN_NO_VIEW)
        _fitted.append(True)
        trainer.fit_loop = ElasticFitLoop.of(trainer.fit_loop)
        for logger in trainer.loggers:
            _ = logger.version if "_version" in vars(logger) else None  # rank 0 opens it soon, and takes the place
        owners = [each for each in (trainer.datamodule, self.lightning_module) if each is not None]
        if "PACELINE_COORDINATOR" in os.environ and any(is_overridden("prepare_data", each) for each in owners):
            prepare = trainer._data_connector.prepare_data
            trainer._data_connector.prepare_data = partial(_one_at_a_time, prepare)

    def stand_alone(self) -> None:
        """Gives this worker the place that it had before `fit`."""
        self._take_rank(self._rank_alone)

    def process_dataloader(self, dataloader: object) -> object:
        """Returns what stands for the training data; other loaders as they are."""
        if not (self.trainer.training and self.trainer.state.fn == TrainerFn.FITTING):
            return dataloader
        if not isinstance(dataloader, DataLoader) or type(dataloader).__iter__ is not DataLoader.__iter__:
            raise UnsupportedOp(
                f"the paceline strategy trains from a DataLoader that iterates as torch's does, and "
                f"{type(dataloader).__name__} does not"
            )
        return TrainingData(dataloader)

    def _refuse(self) -> None:
        """Raises UnsupportedOp for what this strategy cannot do."""
        trainer, callbacks = self.trainer, self.trainer.callbacks
        kinds = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}
        timed = [getattr(callback, "_train_time_interval", None) for callback in callbacks]
        reasons = {
            "GradientAccumulationScheduler: all steps have the same number of batches": any(
                isinstance(callback, GradientAccumulationScheduler) for callback in callbacks
            ),
            f"{', '.join(sorted(kinds & _OWN_UPDATES))}: it changes the model, or trains, beside the steps": bool(
                kinds & _OWN_UPDATES
            ),
            "train_time_interval of a checkpoint: the workers' clocks differ": any(each is not None for each in timed),
            "val_check_interval as a time: the workers' clocks differ": getattr(
                trainer, "_val_check_time_interval", None
            )
            is not None,
            "metrics that keep copies of others (MetricTracker, Running)": any(
                isinstance(module, MetricTracker | Running) for module in self.lightning_module.modules()
            ),
            "reload_dataloaders_every_n_epochs": bool(trainer.reload_dataloaders_every_n_epochs),
            "AsyncCheckpointIO": isinstance(self.checkpoint_io, AsyncCheckpointIO),
            "a process group of torch beside Paceline: start the script with `paceline run`": bool(
                torch.distributed.is_available() and torch.distributed.is_initialized()
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise UnsupportedOp(f"the paceline strategy does not support {reason}")

    @contextlib.contextmanager
    def joined(self, session: paceline.Session) -> Iterator[None]:
        """Inside the block, this worker has a place in the session, and what it logs and saves waits for its step."""
        trainer = self.trainer
        self.session = session
        self._metrics = [module for module in self.lightning_module.modules() if isinstance(module, Metric)]
        self._replicated = paceline.torch.replicate(self.model, session)
        self._batch_rows = trainer.fit_loop.batch_rows
        self._take_rank(session.group.rank if session.members else _IN_NO_VIEW)
        session.on_view(lambda: self._take_rank(session.group.rank))
        savers = [callback for callback in trainer.checkpoint_callbacks if hasattr(callback, "file_exists")]
        for callback in savers:
            callback.file_exists = partial(self._exists, callback)
        try:
            with self.later.collecting(trainer.loggers):
                yield
        finally:
            self.session = self.step = None
            for callback in savers:
                del callback.file_exists

    def _exists(self, callback: Any, filepath: Any, trainer: Any) -> bool:
        """Returns whether a checkpoint has this name, or is about to get it."""
        return self.later.publishes(os.fspath(filepath)) or type(callback).file_exists(callback, filepath, trainer)

    def _take_rank(self, rank: int) -> None:
        """Makes this process the one that logs and saves if it has rank 0."""
        was_first, self.global_rank = self.global_rank == 0, rank
        rank_zero_only.rank = rank
        if rank or was_first or self.session is None:
            return
        trainer = self.trainer
        for logger in trainer.loggers:
            open_logger(logger, goes_on=self.later.count > 0)
        if trainer.enable_autolog_hparams:
            _log_hyperparams(trainer)
        for callback in trainer.callbacks:
            if isinstance(callback, ProgressBar):
                callback.enable()
                if self.has_begun:
                    callback.on_train_start(trainer, self.lightning_module)
                    callback.on_train_epoch_start(trainer, self.lightning_module)
            elif not self.later.count and "ModelSummary" in {kind.__name__ for kind in type(callback).__mro__}:
                callback.on_fit_start(trainer, self.lightning_module)

    # One step ---------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's training step on this worker's rows."""
        group, part = self._group(), self.part
        if group is None or part is None:
            return super().training_step(*args, **kwargs)
        self._gains = Gains(self.trainer._results, self._metrics)
        output = super().training_step(*args, **kwargs)
        if not self.lightning_module.automatic_optimization and group.size > 1:
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                self._share_values(0.0)
                return output
            loss = torch.full_like(loss, self._share_values(float(loss.detach())))
            return {**output, "loss": loss} if isinstance(output, Mapping) else loss
        if output is None and self.lightning_module.automatic_optimization:
            raise UnsupportedOp("training_step returned None, which leaves out a worker's rows: return a loss")
        return output

    def note_result(self, kind: Any, *args: Any) -> Any:
        """Returns what Lightning makes of the output of a training step; its loss will be that of all rows."""
        self._result = kind.from_training_step_output(*args)
        return self._result

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes gradients, which are averaged over the workers in the last batch of a step."""
        part, group = self.part, self._group()
        if part is None or group is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        automatic = self.lightning_module.automatic_optimization
        syncs = automatic and not self.trainer.fit_loop._should_accumulate()
        scaled = closure_loss if part.scale == 1.0 else closure_loss * part.scale
        with contextlib.nullcontext() if syncs else self._replicated.no_sync():
            done = super().backward(scaled, optimizer, *args, **kwargs)
        if automatic and group.size > 1:
            # Only now, so that workers wait for each other once.
            self._result.loss.fill_(self._share_values(float(closure_loss.detach())))
        return done

    def _share_values(self, loss: float) -> float:
        """Puts together what the workers have logged in a pass; returns the mean of their losses."""
        group, part = self._group(), self.part
        assert group is not None
        assert part is not None
        self.later.do(self.is_global_zero)
        weight, usual = part.rows / part.of, self._batch_rows
        numbers, stops = self._gains.share(group, weight, part.rows, [loss], flag=self._wants_stop, usual=usual)
        self.later.rank_0_has_begun()
        if stops and not self.stops:
            self._stop_after_this_step()
        return float(numbers[0])

    def _stop_after_this_step(self) -> None:
        """Stops after this step. All workers call it, so validation and the end of training come in this step."""
        assert self.step is not None
        self.stops = self.together = True
        if not self.step.keeps_copy:
            self.step.keep_copy()

    def begin_step(self, step: paceline.Step) -> None:
        """Begins an attempt at a step, in its block."""
        self.step, self.together = step, False
        self.later.begin_step()
        group = self._group()
        if group is not None and group.size == 1:
            self.later.do(self.is_global_zero)
        self.note_stop()

    def end_step(self) -> None:
        """Ends an attempt, whether it is undone or not."""
        self.step = self.part = None
        self.together = False

    def note_stop(self) -> None:
        """Notes whether this worker was told to stop. If there are others, it stops when they know."""
        self._wants_stop |= bool(self.trainer.should_stop)
        self.trainer.should_stop = False
        group = self._group()
        if group is not None and group.size == 1:
            self.stops |= self._wants_stop

    def agree_to_stop(self) -> None:
        """Finds out whether to stop. If the workers save together, it is a barrier too: rank 0 has saved."""
        self.note_stop()
        if self.together:
            self.stops = self.reduce_boolean_decision(self.stops or self._wants_stop, all=False)
        self.trainer.should_stop = self.stops

    def finish(self) -> None:
        """Does the work that waits for the next step, because no step comes."""
        self.later.begin_step()
        self.later.do(self.is_global_zero)

    def leave(self) -> None:
        """Leaves the job, in which the others go on."""
        if self.is_global_zero:
            self.later.do_files()
        self._take_rank(_IN_NO_VIEW)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Updates the model; in manual optimization after the gradients are averaged."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedOp("LBFGS evaluates its closure several times, and a step's samples go through it once")
        self.has_updated = True
        if self._group() is not None and not self.lightning_module.automatic_optimization:
            closure()
            self._replicated.sync_gradients()
            closure = _nothing
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _group(self) -> paceline.Group | None:
        return None if self.session is None else self.session.group

    # What workers agree on, and checkpoints ---------------------------------------------------------------------------

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns rank 0's value if the workers validate and save together in this step; else the worker's own."""
        group = self._group()
        if not self.together or group is None:
            return obj
        told = np.frombuffer(json.dumps(obj).encode(), np.uint8)
        size = int(group.broadcast(np.array([len(told)]), root=src)[0])
        told = group.broadcast(told if group.rank == src else np.zeros(size, np.uint8), root=src)
        return json.loads(told.tobytes())

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns the decision of all workers if they validate and save together in this step; else its own."""
        group = self._group()
        if not self.together or group is None:
            return decision
        yes = int(group.all_reduce(np.array([decision], np.int64))[0])
        return yes == group.size if all else yes > 0

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint on rank 0; in a step it gets its name once the step is committed."""
        step, path = self.step, os.fspath(filepath)
        if step is None or "://" in path:  # a store writes a file whole or not at all
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        staged = self.later.staged(path, f"{step.number}-{step.generation}")
        super().save_checkpoint(checkpoint, f"{staged}-unfinished", storage_options)
        if self.is_global_zero:
            os.replace(f"{staged}-unfinished", staged)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes a checkpoint on rank 0; in a step once that is committed."""
        if self.step is not None:
            self.later.remove(os.fspath(filepath))
        else:
            super().remove_checkpoint(filepath)


class TrainingData:
    """The training data as Lightning's fit loop sees it, which takes its batches from the steps."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.dataset, self.batch_size, self.sampler = loader.dataset, loader.batch_size, loader.sampler

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return iter(())  # Lightning makes an iterator when it sets up the data, and the fit loop does not use it


def _one_at_a_time(prepare: Callable[[], None]) -> None:
    """Prepares data in one process of a host after the other; later ones find what the first has made."""
    with paceline.once_per_host(os.path.expanduser(_LOCK)):
        prepare()


def _nothing() -> None:
    """Replaces a closure that was evaluated already."""
