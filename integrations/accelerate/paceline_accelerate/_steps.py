"""`Steps`: the batches of a loop of accelerate's, inside the steps of a session."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from accelerate import PartialState
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType, send_to_device

import paceline
import paceline.torch
from paceline.errors import StepOrderError, UnsupportedOp
from paceline_accelerate._together import Block, Together

_IN_NO_VIEW = 1
"""The rank of a worker that is in no view: it neither logs nor saves."""

_ONCE = ("log", "save_state", "save_model")
"""Methods of an Accelerator that log or save on rank 0, and that all workers call."""

_GATHERS = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")


class Steps:
    """The batches of a loop of accelerate's, on workers that may die, join and leave.

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        with paceline_accelerate.Steps(accelerator, model, optimizer, loader, scheduler, epochs=3) as steps:
            for epoch in steps.epochs():
                for batch in steps:
                    with steps.step, accelerator.accumulate(model):
                        accelerator.backward(loss_of(model(batch)))
                        optimizer.step()
                        scheduler.step()
                        optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        accelerator.log({"loss": steps.loss}, step=steps.number)

    A step has the samples of one process, the loader's batch size times `gradient_accumulation_steps`, however many
    workers there are: they share out the rows of each batch. So the learning rate, the number of steps and the losses
    match the same script without Paceline.

    Training belongs in the block of `step`, which may be undone and run again. Logs and saves belong after it:
    `accelerator.log`, `save_state` and `save_model` wait there until the step counts on all workers. Then rank 0 logs
    or saves, once; all workers must call them. All other code behind the block runs in undone attempts too.

    Args:
        accelerator: an `Accelerator` in one process.
        model, optimizer, loader, scheduler: what `accelerator.prepare` returned for them, or None for no scheduler.
        epochs: number of epochs.
        max_steps: number of the last step, if it comes before the end of the last epoch.
        done: steps that were made before, elsewhere: after `accelerator.load_state`.
        seed: seed of the order of samples if the loader shuffles, and of each step's random numbers.
        options: as for `Session.steps`, such as `checkpoint_dir`.

    Attributes:
        number: number of the present step, from 1, whether it will be undone or not.
        loss: mean loss of all rows of the present step, after `accelerator.backward` for its last batch; NaN if the
            step is undone on this worker.
        session: the session, inside the block.

    Raises:
        UnsupportedOp: accelerate is to train in a way of its own (several processes, FSDP, DeepSpeed), or the samples
            of the loader cannot be shared out.
    """

    session: paceline.Session
    _state: paceline.TrainState
    _parts: Any
    _replicated: paceline.torch.Replicated
    _replicated_loss: paceline.torch.Replicated

    def __init__(
        self,
        accelerator: Any,
        model: Any,
        optimizer: Any,
        loader: Any,
        scheduler: Any = None,
        *,
        epochs: int,
        max_steps: int | None = None,
        done: int = 0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._accelerator, self._model, self._optimizer, self._scheduler = accelerator, model, optimizer, scheduler
        self._batches = paceline.torch.ElasticBatches(loader, accelerator.gradient_accumulation_steps, seed)
        sampler = self._batches.sampler
        total = epochs * sampler.steps_per_epoch
        self._total = total if max_steps is None else min(total, max_steps)
        self._done, self._seed, self._options = done, seed, options
        self.number = done
        self._epoch, self._in_epoch = 0, False
        """The present epoch, and whether some of its batches are still to come."""
        self._ahead: paceline.torch.BatchPart | None = None
        """The batch that comes next."""
        self._part: paceline.torch.BatchPart | None = None
        """The present batch."""
        self._has_begun = self._in_block = False
        """Whether a step has begun; and whether its block is open."""
        self._passes = 0
        """Backward passes of the present batch."""
        self._sum: Any = 0.0
        """The loss of the present step's batches up to now."""
        self._mean: Any = math.nan
        self._applied = False
        """Whether this worker has made the present step itself."""
        self._together: Together | None = None
        """The workers, in a block between steps."""
        self._open_trackers: Callable[[], None] | None = None
        """Opens what `accelerator.init_trackers` was called with."""
        # What accelerate asks of the loader that it takes batches from.
        self.end_of_dataloader, self.remainder = False, 0

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._batches)

    def _refuse(self) -> None:
        """Raises UnsupportedOp for what this integration cannot do."""
        accelerator = self._accelerator
        reasons = {
            f"accelerate's {accelerator.distributed_type.value}: start the script with `paceline run`, and import "
            "paceline_accelerate before you make the Accelerator": (accelerator.distributed_type != DistributedType.NO),
            "a prepared loader that the main process reads for all (a stream, dispatch_batches): do not prepare it": (
                any(isinstance(each, DataLoaderDispatcher) for each in accelerator._dataloaders)
            ),
            "a prepared scheduler that is not given to Steps": bool(accelerator._schedulers and not self._scheduler),
            "several optimizers": len(accelerator._optimizers) > 1 or isinstance(self._optimizer, list | tuple),
            "accelerator.skip_first_batches: `Steps(..., done=)` is the number of steps that are made": (
                "SkipBatchSampler" in type(self._batches.loader.batch_sampler).__name__
            ),
            "sync_with_dataloader=False: the batches of a step are of one epoch": (
                not accelerator.gradient_state.sync_with_dataloader
            ),
            "accelerator.init_trackers before `with Steps(...)`: all workers have opened a run; call it in the block": (
                bool(accelerator.trackers)
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise UnsupportedOp(f"paceline_accelerate does not support {reason}")

    # The job ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._refuse()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._batches)  # first: its worker processes are forked
            self.session = session = stack.enter_context(paceline.join())
            self._take_rank(session.group.rank if session.members else _IN_NO_VIEW)
            session.on_view(lambda: self._take_rank(session.group.rank))
            self._patch(stack)
            self._parts = session.batches(
                self._make_state(), self._batches, total=self._total, seed=self._seed, **self._options
            )
            stack.push(self._finish)
            self._leave = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._leave.__exit__(kind, error, trace)

    def _finish(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        """Ends the job, together with the other workers, if its steps are made."""
        if error is None and self._state.step >= self._total:
            next(self._parts, None)

    def _make_state(self) -> paceline.TrainState:
        accelerator, sampler = self._accelerator, self._batches.sampler
        model = accelerator.unwrap_model(self._model, keep_torch_compile=False)
        self._loss = torch.nn.Module()  # its gradient is the loss, which is averaged as the others are
        self._loss.value = torch.nn.Parameter(torch.zeros((), device=accelerator.device))
        self._replicated = paceline.torch.replicate(model, self.session)
        self._replicated_loss = paceline.torch.replicate(self._loss, self.session)
        parts = {"optimizer": getattr(self._optimizer, "optimizer", self._optimizer), "scaler": accelerator.scaler}
        parts |= {f"registered_{number}": each for number, each in enumerate(accelerator._custom_objects)}
        if self._scheduler is not None and self._scheduler not in accelerator._custom_objects:
            parts["scheduler"] = getattr(self._scheduler, "scheduler", self._scheduler)
        sampler.load_state_dict(
            {
                "epoch": self._done // sampler.steps_per_epoch,
                "offset": self._done % sampler.steps_per_epoch * sampler.global_batch,
            }
        )
        self._state = paceline.TrainState(
            model=model,
            loss=self._loss,
            sampler=sampler,
            **{name: part for name, part in parts.items() if part is not None},
        )
        self._state.step = self._done
        return self._state

    def _take_rank(self, rank: int) -> None:
        """Makes this process the one that prints, logs and saves if it has rank 0."""
        for known in (PartialState(), self._accelerator.state):
            known.process_index = known.local_process_index = rank
        if rank == 0 and self._open_trackers is not None and not self._accelerator.trackers:
            self._open_trackers()

    def _patch(self, stack: contextlib.ExitStack) -> None:
        """Gives the accelerator methods for several workers, until the stack ends."""
        accelerator, shared = self._accelerator, PartialState()
        methods: dict[str, Any] = {
            "backward": self._backward,
            "init_trackers": self._init_trackers,
            "check_trigger": self._check_trigger,
            "register_for_checkpointing": self._register,
            **{name: partial(self._once, name) for name in _ONCE},
            **{name: partial(self._gather, name) for name in _GATHERS},
        }
        for name, method in methods.items():
            setattr(accelerator, name, method)
            stack.callback(delattr, accelerator, name)
        # accelerate calls the function in any case where it does not distribute the training itself.
        for name in ("on_main_process", "on_local_main_process"):
            setattr(shared, name, self._on_main_process)  # which stays: so does the rank

    def _on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if PartialState().is_main_process else lambda *_, **__: None

    # The loops --------------------------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[int]:
        """Yields the number of each epoch, from 0; a worker that joins later begins with the job's present one."""
        while self._look_ahead():
            yield self._begin_epoch()
            if self._in_epoch and self._state.step < self._total:
                raise StepOrderError(
                    f"the loop over the batches of epoch {self._epoch} was left before its end: give Steps the number "
                    "of the last step, max_steps, or `break` out of the epochs too"
                )

    def _begin_epoch(self) -> int:
        self._epoch, self._in_epoch = self._batches.sampler.epoch, True
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        """Yields this worker's rows of each batch of the present epoch, on the accelerator's device."""
        accelerator, sampler = self._accelerator, self._batches.sampler
        accelerator.gradient_state._add_dataloader(self)
        try:
            while self._ahead is not None and sampler.epoch == self._epoch:
                part, self._ahead = self._ahead, None
                self._begin(part)
                yield send_to_device(part.batch, accelerator.device)
                if not (self._ends_epoch and self._parts.is_last and self._is_made()):
                    self._look_ahead()
            self._in_epoch = False
        finally:
            accelerator.gradient_state._remove_dataloader(self)

    def _look_ahead(self) -> bool:
        """Gets the next batch; returns False after the last step. The job stays open, for blocks between steps."""
        if self._ahead is None and self._state.step < self._total:
            self._ahead = next(self._parts, None)
        return self._ahead is not None

    def _begin(self, part: paceline.torch.BatchPart) -> None:
        """Tells accelerate which batch comes."""
        sampler = self._batches.sampler
        self._part = part
        self.number = self._state.step + 1
        is_last_of_epoch = sampler.offset + sampler.global_batch >= sampler.n
        self._ends_epoch = is_last_of_epoch or self.number == self._total
        self.end_of_dataloader = self._parts.is_last and is_last_of_epoch
        self._accelerator.step = part.number
        if part.number == 0:
            self._sum = 0.0
            self._prepare_scaler()
        self._has_begun = True

    def _prepare_scaler(self) -> None:
        """Undoes what an undone step has left in accelerate's optimizer and scaler, in mixed precision."""
        optimizer, scaler = self._optimizer, self._accelerator.scaler
        if scaler is None:
            return
        scaler._per_optimizer_states.clear()  # it may have unscaled its gradients
        if not self._has_begun:
            optimizer.__setstate__({})  # it keeps `step` as it was before the session guarded it
        optimizer.optimizer.step = optimizer._optimizer_original_step_method

    def _is_made(self) -> bool:
        """Returns whether the present step is made. It is then, on all workers, if any of them has made it."""
        for attempt in self.retry():
            with attempt:
                pass
        return self._state.step >= self.number

    @property
    def step(self) -> AbstractContextManager[paceline.Step]:
        """The block for the body of the loop over batches: a step of the job is undone or made as a whole."""
        return self._block()

    @contextlib.contextmanager
    def _block(self) -> Iterator[paceline.Step]:
        self._applied = False
        with self._parts.step as step:
            self._in_block, self._passes = True, 0
            try:
                with contextlib.nullcontext() if self._parts.is_last else self._replicated.no_sync():
                    yield step
                if self._passes != 1:
                    raise StepOrderError(
                        f"accelerator.backward(loss) was called {self._passes} times for a batch of step "
                        f"{step.number}: call it once, for the sum of all losses, and for every batch"
                    )
            finally:
                self._in_block = False
        self._applied = step.applied
        if not (step.applied or self._parts.in_step):
            self._mean = math.nan
        if step.skipped and step.cause is None and not self._accelerator.optimizer_step_was_skipped:
            raise StepOrderError(
                f"no optimizer.step() in step {step.number}, whose gradients would be lost: to accumulate those of "
                "several batches use Accelerator(gradient_accumulation_steps=...) and accelerator.accumulate(model)"
            )

    def _backward(self, loss: Any, **kwargs: Any) -> None:
        """Computes gradients; those of a step are averaged over the workers in its last batch."""
        accelerator, part = self._accelerator, self._part
        host = partial(type(accelerator).backward, accelerator)
        if not self._in_block or part is None:
            host(loss, **kwargs)
            return
        self._passes += 1
        is_last = self._parts.is_last
        if accelerator.sync_gradients != is_last:
            raise StepOrderError(
                f"a step has {accelerator.gradient_accumulation_steps} batches (gradient_accumulation_steps), so write "
                "`with steps.step, accelerator.accumulate(model):`"
            )
        host(loss if part.scale == 1.0 else loss * part.scale, **kwargs)
        self._sum = self._sum + loss.detach().float() * part.scale
        if is_last and self._passes == 1:
            value = self._loss.value
            value.grad = (self._sum / (part.number + 1)).to(value.device).reshape(())
            self._replicated_loss.sync_gradients()
            self._mean = value.grad

    @property
    def loss(self) -> float:
        """See the class."""
        return float(self._mean)

    # Between steps ----------------------------------------------------------------------------------------------------

    def retry(self) -> Iterator[AbstractContextManager[None]]:
        """Yields attempts at a block between steps in which the workers communicate, as `Session.retry` does.

            for attempt in steps.retry():
                with attempt:
                    for batch in steps.share(eval_loader):
                        guessed = model(batch["x"]).argmax(-1)
                        metric.add(*accelerator.gather_for_metrics((guessed, batch["y"])))
                    accelerator.log({"accuracy": metric.compute()})

        In the block `gather`, `gather_for_metrics`, `reduce` and `pad_across_processes` work across all workers.
        Outside of it each worker is alone, as with one process. There is no attempt if the others have gone on without
        this worker: set the variables that the block sets before it.

        Raises:
            StepOrderError: before the first step, or before the block of a step's last batch has ended.
        """
        if self._is_between_steps("steps.retry()"):
            block = Block()
            for attempt in self.session.retry():
                yield self._attempt(attempt, block)

    def _is_between_steps(self, name: str) -> bool:
        """Returns whether this worker is between two steps, as the others are; else raises.

        False if they have gone on without this worker: it has a batch of a later epoch already.
        """
        if self._ahead is not None and not self._in_epoch:
            return False
        if self._parts.in_step or not self._has_begun:
            raise StepOrderError(
                f"{name} belongs behind the block of a step, in which all can be undone: after the block of the step's "
                "last batch (`if accelerator.sync_gradients:`) or after the batches of an epoch"
            )
        return True

    def _attempts(self, name: str) -> Iterable[AbstractContextManager[None]]:
        """Returns attempts at a block between steps, or the attempt at the block in which this worker is."""
        if self._together is not None:
            return [contextlib.nullcontext()]
        return self.retry() if self._is_between_steps(name) else []

    @contextlib.contextmanager
    def _attempt(self, attempt: Any, block: Block) -> Iterator[None]:
        with attempt:
            together = self._together = Together(self.session.group, block)
            try:
                yield
            finally:
                self._together = None
            together.finish(has_applied=self._applied, again=attempt.number > 1)

    def share(self, loader: Any) -> Iterator[Any]:
        """Yields this worker's rows of each batch of a loader, in a block of `retry`; no other worker has them.

        Raises:
            StepOrderError: outside of such a block.
            UnsupportedOp: the loader's dataset is a stream.
        """
        if self._together is None:
            raise StepOrderError("steps.share(loader) belongs in `for attempt in steps.retry(): with attempt: ...`")
        return self._together.share(loader, self._accelerator.device)

    def _once(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Logs or saves on rank 0, once, if the present step is made."""
        host = partial(getattr(type(self._accelerator), name), self._accelerator)
        if not (self._has_begun or self._parts.in_step):
            if PartialState().is_main_process:  # a worker that comes later has another rank
                host(*args, **kwargs)
            return
        for attempt in self._attempts(f"accelerator.{name}"):
            with attempt:
                assert self._together is not None
                if name == "save_state" and self._accelerator.project_configuration.automatic_checkpoint_naming:
                    self._together.save_numbered(self._accelerator.project_configuration, partial(host, **kwargs))
                else:
                    self._together.note(host, args, kwargs, is_log=name == "log")

    def _register(self, *objects: Any) -> None:
        raise StepOrderError("accelerator.register_for_checkpointing belongs before `with Steps(...)`, which shares it")

    def _init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Opens trackers on rank 0, and on the worker that has rank 0 after it."""
        self._open_trackers = partial(type(self._accelerator).init_trackers, self._accelerator, *args, **kwargs)
        if PartialState().is_main_process:
            self._open_trackers()

    def _check_trigger(self) -> bool:
        """Returns whether any worker has called `set_trigger`."""
        accelerator, found = self._accelerator, False
        flag = accelerator.flag_tensor
        for attempt in self._attempts("accelerator.check_trigger"):
            with attempt:
                accelerator.flag_tensor = flag
                found = type(accelerator).check_trigger(accelerator)
        return found

    def _gather(self, name: str, data: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_block:
            raise UnsupportedOp(
                f"accelerator.{name} in the block of a step, where each worker has other rows: steps.loss is the mean "
                "loss of all of them"
            )
        if self._together is None:
            return getattr(type(self._accelerator), name)(self._accelerator, data, *args, **kwargs)
        if name == "reduce":
            return self._together.reduce(data, *args, **kwargs)
        if name == "pad_across_processes":
            return self._together.pad(data, *args, **kwargs)
        return self._together.gather(data, *args, **kwargs)
