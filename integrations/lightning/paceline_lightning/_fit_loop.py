"""`ElasticFitLoop`: Lightning's fit loop, over the steps of a session in place of its own two loops.

Lightning's body of a batch, of the end of an epoch and of a validation stay as they are; they run inside the steps.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any, Self

from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.loops.fetchers import _DataFetcher, _DataLoaderIterDataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch.utils._pytree import tree_unflatten

import paceline
import paceline.torch
from paceline.errors import Dismissed, UnsupportedOp
from paceline_lightning._bookkeeping import Bookkeeping
from paceline_lightning._validation import ElasticValidation

_ENDLESS = 1 << 40
"""Number of the last step if nothing limits them: neither epochs nor steps."""


class ElasticFitLoop(_FitLoop):  # type: ignore[misc]  # Lightning's types are not checked here
    """Trains by the steps of a session."""

    @classmethod
    def of(cls, loop: Any) -> Self:
        """Returns a loop in place of Lightning's own, with its settings and progress."""
        new = cls.__new__(cls)
        new.__dict__.update(vars(loop))
        epoch_loop = new.epoch_loop
        epoch_loop.val_loop = ElasticValidation.of(epoch_loop.val_loop)
        epoch_loop.automatic_optimization.output_result_cls = _Results(new.trainer.strategy)
        return new

    def run(self) -> None:
        """Joins the job, and trains."""
        trainer, strategy = self.trainer, self.trainer.strategy
        self.setup_data()
        if self.skip:
            strategy.stand_alone()
            return
        # Lightning has a handler for SIGTERM by now, which would end training: a worker that is told so drains instead.
        before = trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
        # The data first: worker processes are forked.
        with self._open_batches() as self._batches, paceline.join() as session, strategy.joined(session):
            self._fetcher = _Fetcher(self)
            self._bookkeeping = Bookkeeping(trainer)
            self.reset()
            self.on_run_start()
            strategy.has_begun = True
            try:
                self._run_steps(session, in_epoch=self._goes_on_in_epoch())
            except Dismissed:  # the others go on
                strategy.leave()
                raise
            strategy.finish()
            self._restarting = False
            self.on_run_end()
            strategy.finish()

    def _open_batches(self) -> paceline.torch.ElasticBatches:
        """Returns the batches of the training data, for the steps."""
        if len(self._combined_loader.flattened) != 1:
            raise UnsupportedOp("the paceline strategy trains from one DataLoader, not from several at once")
        if isinstance(self._data_fetcher, _DataLoaderIterDataFetcher):
            raise UnsupportedOp("training_step(dataloader_iter) takes batches by itself: let it have a batch")
        (data,) = self._combined_loader.flattened
        automatic = self.trainer.lightning_module.automatic_optimization
        return paceline.torch.ElasticBatches(
            data.loader,
            self.trainer.accumulate_grad_batches if automatic else 1,
            _seed(),
            limit=None if self.max_batches == float("inf") else int(self.max_batches),
        )

    @property
    def batch_rows(self) -> int:
        """The number of rows of a whole batch."""
        return self._batches.rows

    def _goes_on_in_epoch(self) -> bool:
        """Goes on from a checkpoint up to where a batch is needed, as Lightning does; False if that begins an epoch."""
        loop = self.epoch_loop
        if not (self.restarted_mid_epoch or self.restarted_on_epoch_end):
            self.on_iteration_done()
            return False
        self.on_advance_start()
        loop.reset()
        loop.on_run_start(self._fetcher)
        self._fetcher.begin([])
        while not loop.done:
            try:
                loop.advance(self._fetcher)
                loop.on_advance_end(self._fetcher)
            except _NeedsBatch:
                self.on_iteration_done()
                return True
            finally:
                loop.on_iteration_done()
        self.on_advance_end()
        self.on_iteration_done()
        return False

    # The loop ---------------------------------------------------------------------------------------------------------

    def _run_steps(self, session: paceline.Session, *, in_epoch: bool) -> None:
        trainer, strategy, loop = self.trainer, self.trainer.strategy, self.epoch_loop
        sampler, bookkeeping = self._batches.sampler, self._bookkeeping
        passes = sampler.global_batch // self._batches.rows
        progress = self.epoch_progress.current
        epochs = progress.completed if in_epoch else progress.processed
        taken, rest = divmod(loop.batch_progress.current.ready if in_epoch else 0, passes)
        if rest:
            raise UnsupportedOp(
                f"the checkpoint is {rest} batches after an update: take one that was saved at an update"
            )
        sampler.load_state_dict({"epoch": epochs, "offset": taken * sampler.global_batch})
        optimizers = {f"optimizer_{number}": each for number, each in enumerate(strategy.optimizers)}
        schedulers = {f"scheduler_{n}": config.scheduler for n, config in enumerate(strategy.lr_scheduler_configs)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        state = paceline.TrainState(
            model=strategy.model,
            **optimizers,
            **schedulers,
            trainer=bookkeeping,
            sampler=sampler,
            **({} if scaler is None else {"scaler": scaler}),
        )
        state.step = epochs * sampler.steps_per_epoch + taken
        total = self._last_step(state.step, epochs, taken)
        for step in session.steps(state, total=total, seed=_seed()):
            if scaler is not None:
                scaler._per_optimizer_states.clear()  # a step that was undone may have unscaled its gradients
            with step:
                if not bookkeeping.finished:  # else the step before was the last one, on all workers
                    self._train(session, step, is_last=step.number == total)
            if bookkeeping.finished and step.number < total:
                session.stop()
        trainer.should_stop = strategy.stops

    def _last_step(self, done: int, epochs: int, taken: int) -> int:
        """Returns the number of the last step, of which `done` are done: whole epochs, and the others of this one."""
        left = _ENDLESS - done
        if self.max_epochs not in (None, -1):
            left = min(left, (self.max_epochs - epochs) * self._batches.sampler.steps_per_epoch - taken)
        if self.max_steps != -1 and self.trainer.lightning_module.automatic_optimization:
            left = min(left, self.max_steps - self.epoch_loop.global_step)
        return done + max(left, 0)

    def _train(self, session: paceline.Session, step: paceline.Step, *, is_last: bool) -> None:
        """Makes a step as Lightning does: the passes, the update, validation, and the end of an epoch."""
        trainer, strategy, loop = self.trainer, self.trainer.strategy, self.epoch_loop
        begins = self._batches.sampler.offset == 0
        strategy.begin_step(step)
        trainer.training = True
        trainer.lightning_module._current_fx_name = None  # a step that was undone may have left it
        parts = self._batches.parts(step)
        manual = not trainer.lightning_module.automatic_optimization
        more = is_last or manual or self._foresees_more(len(parts), begins=begins)
        if manual or (more and session.size > 1):
            step.keep_copy()  # so that all of it can be undone
        strategy.together = more and session.size > 1
        try:
            if begins:
                self.on_advance_start()
                loop.reset()
                loop.on_run_start(self._fetcher)
            self._fetcher.begin(parts)
            for strategy.part in parts:
                self._pass(is_last=strategy.part is parts[-1])
            strategy.agree_to_stop()
            if loop.done:
                self.on_advance_end()
                self.on_iteration_done()
                strategy.agree_to_stop()
                self._bookkeeping.finished = self.done
            if self._bookkeeping.finished and strategy.together:  # no step comes that could do it
                strategy.finish()
                session.group.barrier()
        except BaseException:
            with contextlib.suppress(ValueError):  # manual optimization has started it, and would do so again
                trainer.profiler.stop("optimizer_step")
            raise
        finally:
            strategy.end_step()
            loop.val_loop.leave()

    def _pass(self, *, is_last: bool) -> None:
        """Takes a batch through the module, as Lightning does."""
        trainer, strategy, loop = self.trainer, self.trainer.strategy, self.epoch_loop
        strategy.has_updated = False
        try:
            loop.advance(self._fetcher)
        except StopIteration:
            raise UnsupportedOp("on_train_batch_start returned -1: all epochs are whole") from None
        if not (trainer.lightning_module.automatic_optimization or strategy.has_updated):
            raise UnsupportedOp(
                "training_step made no update: in manual optimization gradients of several batches cannot add up, "
                "since a worker that is lost would take its part with it"
            )
        strategy.note_stop()
        trainer.should_stop = is_last and strategy.stops  # after which Lightning validates
        loop.on_advance_end(self._fetcher)
        loop.on_iteration_done()

    def _foresees_more(self, passes: int, *, begins: bool) -> bool:
        """Returns True if Lightning will validate or save in the next step, as far as its settings say."""
        trainer, loop = self.trainer, self.epoch_loop
        before = 0 if begins else loop.batch_progress.current.ready
        if (trainer.strategy.stops and self._may_stop_early()) or before + passes >= trainer.num_training_batches:
            return True
        if trainer.check_val_every_n_epoch is None:
            before = loop.batch_progress.total.ready
        every = trainer.val_check_batch
        if loop._should_check_val_epoch() and any((before + each) % every == 0 for each in range(1, passes + 1)):
            return True
        saves = [getattr(callback, "_every_n_train_steps", 0) for callback in trainer.checkpoint_callbacks]
        return any(every and (loop.global_step + 1) % every == 0 for every in saves)

    def _may_stop_early(self) -> bool:
        """Returns whether the least number of epochs and steps will have been made after the next step."""
        steps, epochs = self.min_steps, self.min_epochs
        return (not steps or self.epoch_loop.global_step + 1 >= steps) and (
            not epochs or self.epoch_progress.current.processed >= epochs
        )


class _NeedsBatch(Exception):
    """Lightning's loop needs a batch, which only a step has."""


class _Fetcher(_DataFetcher):  # type: ignore[misc]
    """Gives Lightning's loop the parts of a step's batches."""

    def __init__(self, loop: ElasticFitLoop) -> None:
        super().__init__()
        self._loop = loop

    def begin(self, parts: Sequence[paceline.torch.BatchPart]) -> None:
        """Begins a step with these parts."""
        self._parts = iter(parts)
        self.fetched = self._loop.epoch_loop.batch_progress.current.ready

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        part = next(self._parts, None)
        if part is None:
            raise _NeedsBatch
        self.fetched += 1
        self.done = self.fetched >= self._loop.max_batches
        return tree_unflatten([part.batch], self._loop._combined_loader._spec), self.fetched - 1, 0


class _Results:
    """Stands for Lightning's class of the results of a training step."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def from_training_step_output(self, *args: Any) -> Any:
        return self._strategy.note_result(ClosureResult, *args)


def _seed() -> int:
    """Returns the seed that `lightning.seed_everything` has set, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
