"""`ElasticTrainer`: the Trainer's body of a step, inside the steps of a session."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback, ProgressCallback, TrainerControl
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

import paceline
import paceline.torch
from paceline.errors import StepOrderError, UnsupportedOp
from paceline_transformers._bookkeeping import Bookkeeping
from paceline_transformers._evaluation import can_share, evaluate_together
from paceline_transformers._samples import Batch, HostLoader

_SERVICES = "transformers.integrations"

_AFTER_EVALUATION = {"ReduceLROnPlateau", "GreedyLR"}
"""Schedulers that the Trainer steps with the result of an evaluation."""

_STAGING = "_saving-"
"""Begins the names of folders in which checkpoints are written. What begins with "_" is not uploaded to the Hub."""


_trained: list[bool] = []
"""Has an entry once `train` has been called in this process."""


class _Counts(NamedTuple):
    """Of samples: items that the loss is divided by, whether there are such, tokens, and operations of the model."""

    items: float = 0.0
    counted: float = 0.0
    tokens: float = 0.0
    flos: float = 0.0


class ElasticTrainer(Trainer):  # type: ignore[misc]  # transformers has no types here
    """transformers' `Trainer` on workers that may die, join and leave during training.

        trainer = ElasticTrainer(model=model, args=args, train_dataset=dataset)
        trainer.train()

    A step has the samples of one process, `per_device_train_batch_size` times `gradient_accumulation_steps`, however
    many workers there are: they share them out. So the learning rate, the number of steps and the losses match
    the same script without Paceline. `train` joins the job, and leaves it at its end. Outside of `train`, as in
    `evaluate` after it, each worker works alone.

    A subclass of `Trainer` becomes elastic by a class of both: `class ElasticSFTTrainer(ElasticTrainer, SFTTrainer)`.

    Attributes:
        same_bits: set it before `train`: the `gradient_accumulation_steps` batches of a step become microbatches, and
            losses and weights have the same bits on any number of workers, up to the number of batches.
    """

    same_bits = False

    control: Any
    _host: HostLoader | None = None
    """The data loader of the present `train`."""
    _session: paceline.Session | None = None
    _staging = ""
    """The folder in which a checkpoint is being written."""
    _together = False
    """Whether the workers evaluate and save together in this step, which is undone if one of them is lost then."""
    _counted: tuple[int, dict[int, _Counts]] = (0, {})
    """The number of the present step, and the counts of the microbatches that this worker has computed in it."""
    _host_batches = 1
    """The batches that the Trainer alone would make of the present step."""
    _divides: bool | None = None
    """Whether the model divides its loss by the number of items that it is told; None if that is not known yet."""
    _reported: int | None = None
    """How many lines of the log rank 0 has told callbacks; None outside of the loop over steps."""
    _heard = 0
    """How many lines there were when this worker's callbacks last heard of them."""

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Joins the job, and trains; the Trainer's `train` calls this."""
        self._refuse(kwargs.get("trial"))
        if _trained and "PACELINE_COORDINATOR" in os.environ:
            raise StepOrderError(
                f"train() was called again in pid {os.getpid()}, whose job is done: start a run for each"
            )
        _trained.append(True)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._host = HostLoader(self.get_train_dataloader(), self.args.per_device_train_batch_size, seed)
        try:
            # The loader first: its worker processes are forked.
            with self._host.elastic() as self._loader, paceline.join() as session:
                self._session = session
                self._take_rank(session.group.rank if session.members else 1)
                session.on_view(lambda: self._take_rank(session.group.rank))
                return super()._inner_training_loop(*args, **kwargs)
        finally:
            self._session = self._host = None

    def get_train_dataloader(self) -> Any:
        """Returns the data loader of the Trainer."""
        return super().get_train_dataloader() if self._host is None else self._host.loader

    def _refuse(self, trial: Any) -> None:
        """Raises UnsupportedOp for what this integration cannot do."""
        args = self.args
        reasons = {
            "several GPUs in one process: give each worker its own (CUDA_VISIBLE_DEVICES)": args.n_gpu > 1,
            "a process group of torch beside Paceline: start the script with `paceline run`, and import "
            "paceline_transformers before you make the arguments": args.world_size > 1,
            "DeepSpeed": self.is_deepspeed_enabled,
            "FSDP": self.is_fsdp_enabled,
            "auto_find_batch_size: workers would find other sizes": args.auto_find_batch_size,
            "enable_jit_checkpoint: a preempted worker drains": getattr(args, "enable_jit_checkpoint", False),
            "optimizers without a schedule (schedule_free_*)": "schedule_free" in str(args.optim).lower(),
            "a search of hyperparameters": trial is not None,
        }
        for reason, holds in reasons.items():
            if holds:
                raise UnsupportedOp(f"ElasticTrainer does not support {reason}")

    def _take_rank(self, rank: int) -> None:
        """Makes this process the one that logs and saves if it has rank 0."""
        was_first = self.args.process_index == 0
        for known in (PartialState(), self.accelerator.state):
            known.process_index = known.local_process_index = rank
        self.state.is_world_process_zero = self.state.is_local_process_zero = rank == 0
        if rank == 0 and not was_first:
            for callback in self.callback_handler.callbacks:
                # A bar, or a connection to a service, which only the first process has opened so far.
                if isinstance(callback, ProgressCallback) or type(callback).__module__.startswith(_SERVICES):
                    if hasattr(callback, "_initialized"):
                        callback._initialized = False
                    callback.on_train_begin(self.args, self.state, self.control, model=self.model)

    # The loop ---------------------------------------------------------------------------------------------------------

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        **_: Any,
    ) -> None:
        """Trains to the end, not for one epoch: the training state says at which epoch the job is."""
        args, session, host = self.args, self._session, self._host
        assert session is not None
        assert host is not None
        log_evaluate_save = functools.partial(
            self._maybe_log_save_evaluate,
            model=model,
            trial=trial,
            ignore_keys_for_eval=ignore_keys_for_eval,
            start_time=start_time,
        )
        sampler = paceline.ElasticSampler(
            len(host),
            args.per_device_train_batch_size * args.gradient_accumulation_steps,
            host.seed,
            order=host.order,
            microbatches=args.gradient_accumulation_steps if self.same_bits else 0,
        )
        before, taken = divmod(self.state.global_step, sampler.steps_per_epoch)
        sampler.load_state_dict({"epoch": before, "offset": taken * sampler.global_batch})
        self._loss = torch.nn.Module()  # its gradient is the loss, which is averaged as the others are
        self._loss.value = torch.nn.Parameter(torch.zeros(()))
        self._replicated = paceline.torch.replicate(self.model, session)
        self._replicated_loss = paceline.torch.replicate(self._loss, session)
        self._tr_loss = torch.zeros(())
        scaler = {} if self.accelerator.scaler is None else {"scaler": self.accelerator.scaler}
        state = paceline.TrainState(
            model=self.model,
            optimizer=self.optimizer.optimizer,
            lr_scheduler=self.lr_scheduler,
            loss=self._loss,
            trainer=Bookkeeping(self),
            sampler=sampler,
            **scaler,
        )
        state.step = self.state.global_step
        for step in session.steps(state, total=self.state.max_steps, seed=args.seed):
            if scaler:
                self.optimizer.__setstate__({})  # accelerate keeps `step` as it was before the session guarded it
                self.accelerator.scaler._per_optimizer_states.clear()  # an undone step may have unscaled its gradients
            self._tell_logs()
            with step:
                if not self.control.should_training_stop:  # else the step before was the last one, on all workers
                    self._train(session, step, model, sampler, steps_in_epoch, log_evaluate_save)
            if self.control.should_training_stop and step.number < self.state.max_steps:
                session.stop()
        self._tell_logs()
        self._reported = None

    def _train(
        self,
        session: paceline.Session,
        step: paceline.Step,
        model: Any,
        sampler: paceline.ElasticSampler,
        batches_in_epoch: int,
        log_evaluate_save: Any,
    ) -> None:
        """Makes a step as the Trainer does: forward and backward passes, the update, log, evaluation and checkpoint."""
        rows, end = self.args.per_device_train_batch_size, sampler.offset + sampler.global_batch
        self._host_batches = math.ceil((min(end, sampler.n) - sampler.offset) / rows)
        epoch = sampler.epoch + min(end // rows, batches_in_epoch) / batches_in_epoch
        self._together = session.size > 1 and self._foresees_more(epoch, ends_epoch=end >= sampler.n)
        if self._together:
            step.keep_copy()  # so that all of it can be undone
        try:
            self._compute_gradients(session, step, model)
            self._update(model, epoch, log_evaluate_save, ends_epoch=end >= sampler.n)
            if self._together:
                session.group.barrier()  # rank 0 has saved
        finally:
            self._together = False

    def _foresees_more(self, epoch: float, *, ends_epoch: bool) -> bool:
        """Returns True if the Trainer will evaluate or save after the next update, as far as its arguments say."""
        flow, control = DefaultFlowCallback(), TrainerControl()
        state = dataclasses.replace(self.state, global_step=self.state.global_step + 1, epoch=epoch)
        flow.on_step_end(self.args, state, control)
        if ends_epoch or control.should_training_stop:
            flow.on_epoch_end(self.args, state, control)
        return bool(control.should_evaluate or control.should_save)

    def _tell_logs(self) -> None:
        """Tells callbacks what the step before has logged.

        Rank 0 may have died in that step, also if the others do not know it yet: then they tell it when this step
        begins anew. So they count it as told only once rank 0 takes part in this step.
        """
        history = self.state.log_history
        self._heard = len(history)
        before = self._heard if self._reported is None else self._reported
        if self._reported is None or self.state.is_world_process_zero:
            self._reported = self._heard
        for entry in history[before:]:
            if entry["step"] == self.state.global_step:  # a worker that comes back has heard less
                logs = {name: value for name, value in entry.items() if name != "step"}
                before_log = dataclasses.replace(self.control, should_log=False)
                self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)
                if self.control != before_log:  # it would be forgotten if the step that begins now were undone
                    raise UnsupportedOp("a callback has changed `control` in on_log: change it in on_step_end")

    # One step ---------------------------------------------------------------------------------------------------------

    def _compute_gradients(self, session: paceline.Session, step: paceline.Step, model: Any) -> None:
        """Computes the gradients and the loss of this worker's samples; both are averaged over the workers."""
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        if not self.same_bits:
            batches = self._loader.batch(step)
            own = {0: self._count(model, batches)} if step.samples else {}
            items = self._agree_on_items(session, own)
            self._run_passes(model, batches, step.weight, items)
            return
        micros = [(micro, self._loader.batch(micro)) for micro in step.microbatches]
        number, counted = self._counted
        kept = step.kept_microbatches if number == step.number else ()  # computed in an attempt that was undone
        own = {number: counts for number, counts in counted.items() if number in kept}
        own |= {
            micro.number: self._count(model, batches)
            for micro, batches in micros
            if micro.samples and not micro.is_check
        }
        self._counted = step.number, own
        items = self._agree_on_items(session, own)
        for micro, batches in micros:
            with micro:
                self._run_passes(model, batches, micro.weight, items)

    def _count(self, model: Any, batches: list[Batch]) -> _Counts:
        """Counts what is in some batches."""
        inputs, seen = [inputs for _, inputs in batches], self.state.num_input_tokens_seen
        for each in inputs:
            self._track_num_input_tokens(each)
        tokens, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen - seen, seen
        flos = float(sum(self.floating_point_ops(each) for each in inputs))
        _, items = self.get_batch_samples(iter(inputs), len(inputs), self.args.device)
        if items is None:
            return _Counts(tokens=tokens, flos=flos)
        if self._divides is None and items > 0:
            self._divides = self._depends_on_items(model, inputs[0], float(items))
        return _Counts(float(items), 1.0, tokens, flos)

    def _depends_on_items(self, model: Any, inputs: Any, items: float) -> bool:
        """Returns whether the loss depends on the number of items that the model is told: some take and ignore it."""
        model.train()
        losses = []
        for told in (items, 2 * items):
            with torch.random.fork_rng(), torch.no_grad(), self.compute_loss_context_manager():
                given = self._prepare_inputs(dict(inputs))
                number = torch.tensor(told, device=self.args.device)
                losses.append(float(self.compute_loss(model, given, num_items_in_batch=number)))
        return losses[0] != losses[1]

    def _agree_on_items(self, session: paceline.Session, own: dict[int, _Counts]) -> float | None:
        """Sums the counts of all workers; returns the items that the loss is divided by, None for the samples."""
        total = np.array([*map(sum, zip(_Counts(), *own.values(), strict=True)), bool(self._divides)], np.float64)
        if session.size > 1:
            total = session.group.all_reduce(total, label="items")
            self._reported = self._heard  # rank 0 is there, and has told its log before it began this step
        items, counted, tokens, flos, divides = total.tolist()
        self.state.num_input_tokens_seen += int(tokens)
        self.current_flos += flos
        return items if counted and divides else None

    def _run_passes(self, model: Any, batches: list[Batch], weight: float, items: float | None) -> None:
        """Runs a forward and a backward pass for each batch, which together have `weight` of the step's samples."""
        rows = sum(rows for rows, _ in batches)
        # Without items the Trainer divides the loss by this, but not if the model takes their number and ignores it.
        times = self._host_batches if items is None and self._divides is False else 1
        share = None if items is None else torch.tensor(items * weight or 1.0, device=self.args.device)
        loss = torch.zeros(())
        with self._replicated.no_sync() if len(batches) > 1 else contextlib.nullcontext():
            for number, inputs in batches:
                self.current_gradient_accumulation_steps = rows / number / times
                loss += self.training_step(model, inputs, share).float().cpu()
        if len(batches) > 1:
            self._replicated.sync_gradients()
        self._loss.value.grad = loss
        self._replicated_loss.sync_gradients()

    def _update(self, model: Any, epoch: float, log_evaluate_save: Any, *, ends_epoch: bool) -> None:
        """Makes the update; then logs, evaluates and saves as the Trainer does."""
        args, handler = self.args, self.callback_handler
        grad_norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        grad_norm = self._get_grad_norm(model, grad_norm=grad_norm)
        self.control = handler.on_pre_optimizer_step(args, self.state, self.control)
        self.optimizer.step()
        self.control = handler.on_optimizer_step(args, self.state, self.control)
        learning_rate = self._get_learning_rate()
        kinds = {kind.__name__ for kind in type(self.lr_scheduler).__mro__}
        if not (self.accelerator.optimizer_step_was_skipped or kinds & _AFTER_EVALUATION):
            self.lr_scheduler.step()
        self._add_loss(float(self._loss.value.grad))
        model.zero_grad()
        self.state.global_step += 1
        self.state.epoch = epoch
        self.control = handler.on_step_end(args, self.state, self.control)
        log_evaluate_save(tr_loss=self._tr_loss, grad_norm=grad_norm, epoch=epoch, learning_rate=learning_rate)
        if self.control.should_epoch_stop:
            raise UnsupportedOp("a callback has set control.should_epoch_stop: all epochs are whole")
        if ends_epoch or self.control.should_training_stop:
            self.control = handler.on_epoch_end(args, self.state, self.control)
            log_evaluate_save(tr_loss=self._tr_loss, grad_norm=grad_norm, epoch=epoch, learning_rate=learning_rate)
            if not self.control.should_training_stop:
                self.control = handler.on_epoch_begin(args, self.state, self.control)

    def _add_loss(self, loss: float) -> None:
        """Adds the loss of a step to those of the steps since the last log, as the Trainer does."""
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        else:
            self._tr_loss += loss

    # Logs, evaluation, checkpoints ------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs, as the Trainer does; in a step, which may still be undone, callbacks do not hear of it yet."""
        with contextlib.nullcontext() if self._reported is None else _muted(self.callback_handler):
            super().log(logs, *args, **kwargs)

    def evaluation_loop(self, dataloader: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        """Evaluates, as the Trainer does; if the evaluation was foreseen the workers share out the samples."""
        evaluate = super().evaluation_loop
        if self._together and self._session is not None and can_share(self, dataloader):
            return evaluate_together(self, self._session.group, evaluate, dataloader, description, *args, **kwargs)
        return evaluate(dataloader, description, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Saves a checkpoint on rank 0, which gets its name once it is whole."""
        output, step = self.args.output_dir, self.state.global_step
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        self._staging = os.path.join(output, f"{_STAGING}{os.uname().nodename}-{os.getpid()}")
        try:
            if self.args.should_save:
                super()._save_checkpoint(model, trial)
            best = os.path.join(output, f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            if self.state.best_global_step == step or (self.state.best_global_step and os.path.isdir(best)):
                self.state.best_model_checkpoint = best
            if self.args.should_save:
                self._publish(os.path.join(self._staging, name), os.path.join(output, name))
        finally:
            self._staging = ""
        if self.args.push_to_hub:
            self._push_from_checkpoint(os.path.join(output, name))

    def _publish(self, staged: str, folder: str) -> None:
        """Gives a checkpoint its name, and removes old ones."""
        args, state = self.args, self.state
        state.save_to_json(os.path.join(staged, TRAINER_STATE_NAME))
        shutil.rmtree(folder, ignore_errors=True)  # an attempt at this step that was undone may have saved it
        os.replace(staged, folder)
        for entry in os.scandir(args.output_dir):
            if entry.name.startswith(_STAGING):  # of this process, or of one that was killed while it saved
                shutil.rmtree(entry.path, ignore_errors=True)
        rotate_checkpoints(args.output_dir, args.save_total_limit, state.best_model_checkpoint, use_mtime=True)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._staging:  # the folder is about to get its name
            super()._push_from_checkpoint(checkpoint_folder)

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or str(super()._get_output_dir(trial))


@contextlib.contextmanager
def _muted(handler: Any) -> Iterator[None]:
    """Inside the block, callbacks are not called."""
    handler.call_event = lambda event, args, state, control, **kwargs: control
    try:
        yield
    finally:
        del handler.call_event
