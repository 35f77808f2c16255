"""torchtitan's trainer on replicas that may die, come and go: torchtitan inside a replica, Paceline between them.

    # llama.py
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from paceline_torchtitan import elastic

    def debugmodel():
        return elastic(llama3_debugmodel())

    paceline run -n 4 --replica-size 2 --min 1 --restarts 100 -m torchtitan.train --module llama --config debugmodel

The model, its parallelism, loss, optimizers, schedules and `train_step` are torchtitan's own. The loop over steps and
the source of batches are replaced: samples come by index, so that each is used once whatever dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.utils import dist_sum_tensor
from torchtitan.trainer import Trainer

import paceline
import paceline.torch

__all__ = ["ElasticTrainer", "elastic"]


class ElasticTrainer(Trainer):  # type: ignore[misc]  # torchtitan has no types here
    """torchtitan's trainer, as one rank of a replica.

    `training.global_batch_size` counts the samples of a step over all replicas. A replica's share goes through the
    model in as many passes of `training.local_batch_size` per rank as it takes; the last one is filled up with samples
    whose labels are all ignored.
    """

    step: int

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """torchtitan's configuration, and Paceline's."""

        microbatches: int = 0
        """V, the microbatches of a step, at least as many as there can be replicas; 0 for none. With them the bits do
        not depend on which replicas die."""

    def samples(self) -> Sequence[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Returns the samples by index: (inputs, labels), without a batch's first axis.

        A data loader that has `__getitem__` and `__len__` is returned as it is. Of another one, as torchtitan's are,
        all that it yields in an epoch is kept in memory.
        """
        if hasattr(self.dataloader, "__getitem__"):
            return self.dataloader  # type: ignore[no-any-return]
        config = self.config.dataloader
        if hasattr(config, "infinite"):
            config = dataclasses.replace(config, infinite=False)
        length = self.config.training.seq_len
        loader = config.build(dp_world_size=1, dp_rank=0, tokenizer=self.tokenizer, seq_len=length, local_batch_size=1)
        return [({name: value[0] for name, value in inputs.items()}, labels[0]) for inputs, labels in loader]

    def train(self) -> None:
        """Trains until `training.steps`, together with the other replicas of the job; see `Session.steps`."""
        config, training = self.config, self.config.training
        self.checkpointer.load(step=config.checkpoint.load_step)  # weights to begin with, if it names some
        if self.step:
            raise ValueError(
                f"{config.dump_folder} has a checkpoint of torchtitan's own, of step {self.step}, from which Paceline "
                "does not go on: take another --dump_folder, and its weights by --checkpoint.initial_load_path"
            )
        self._samples = self.samples()
        self._shards = self.parallel_dims.get_mesh("batch") if self.parallel_dims.dp_enabled else None
        self._place: int = self._shards.get_local_rank() if self._shards else 0
        self._degree: int = self._shards.size() if self._shards else 1
        wanted = training.global_batch_size
        global_batch = wanted if wanted > 0 else training.local_batch_size * self._degree
        self.gradient_accumulation_steps = 1  # `forward_backward_step` has all passes
        self.optimizers.param_groups.clear()  # it changes nothing itself: those that it calls do, and are in the state
        self._loss = torch.nn.Module()  # its gradient is the loss, which is averaged in the same step as the others
        self._loss.value = torch.nn.Parameter(torch.zeros(()))

        with paceline.join(replica=dist.group.WORLD) as session:
            self._replicated = [paceline.torch.replicate(each, session) for each in (*self.model_parts, self._loss)]
            state = paceline.TrainState(
                **{f"model{n or ''}": part for n, part in enumerate(self.model_parts)},
                **{f"optimizer{n or ''}": optimizer for n, optimizer in enumerate(self.optimizers)},
                lr_schedulers=self.lr_schedulers,
                loss=self._loss,
                sampler=paceline.ElasticSampler(len(self._samples), global_batch, microbatches=config.microbatches),
            )
            folder = os.path.join(config.dump_folder, "paceline") if config.checkpoint.enable else None
            every = config.checkpoint.interval if folder else None
            with config.profiler.build(global_step=0, base_folder=config.dump_folder) as profiler:
                for step in session.steps(state, total=training.steps, checkpoint_dir=folder, checkpoint_every=every):
                    self._step, self.step = step, step.number
                    self.ntokens_seen = (step.number - 1) * global_batch * training.seq_len // self._degree
                    self.gc_handler.run(step.number)
                    with step:
                        self.train_step(itertools.repeat(({}, torch.zeros(1, dtype=torch.int64))))
                    if step.applied and config.validator.enable and self.validator.should_validate(step.number):
                        self.validator.validate(self.model_parts, step.number)
                    profiler.step()

    def forward_backward_step(self, **_: Any) -> torch.Tensor:
        """Computes the gradients of the step; averages them, and the loss that it returns, over the replicas."""
        self.optimizers.zero_grad()  # torchtitan leaves zeros, for CUDA graphs
        self._loss.value.grad = None
        if not self.config.microbatches:
            self._run(self._step.indices)
        else:
            for micro in self._step.microbatches:
                with micro:
                    self._run(micro.indices)
        return self._loss.value.grad.to(self.device)

    def _run(self, indices: Iterable[int]) -> None:
        """Takes samples of this replica through the model, with torchtitan's step for each pass."""
        passes = self._passes(indices)
        valid = torch.stack([(labels != IGNORE_INDEX).sum() for each in passes for _, labels in each]).sum()
        valid = valid.to(self.device) if self._shards is None else dist_sum_tensor(valid.to(self.device), self._shards)
        loss, piped = torch.zeros(()), self.parallel_dims.pp_enabled
        with contextlib.ExitStack() as quiet:  # pipelines and losses in chunks have several backward passes in each
            for replicated in self._replicated:
                quiet.enter_context(replicated.no_sync())
            for each in passes:
                inputs = [{name: value.to(self.device) for name, value in inputs.items()} for inputs, _ in each]
                labels = [labels.to(self.device) for _, labels in each]
                found = super().forward_backward_step(
                    input_dict=inputs if piped else inputs[0],
                    labels=labels if piped else labels[0],
                    global_valid_tokens=valid,
                )
                loss += (found.to_local() if isinstance(found, DTensor) else found).detach().cpu().reshape(())
        self._loss.value.grad = loss
        for replicated in self._replicated:
            replicated.sync_gradients()

    def _passes(self, indices: Iterable[int]) -> list[list[tuple[dict[str, torch.Tensor], torch.Tensor]]]:
        """Returns this rank's part of a replica's samples: the batches of each pass, one but for a pipeline."""
        rows, batches = self.config.training.local_batch_size, self.num_pipeline_parallel_microbatches
        chosen = [int(index) for index in indices] or [0]  # a replica without a sample takes part, with weight 0
        passes = -(-len(chosen) // (rows * self._degree))
        mine = [self._samples[index] for index in chosen[self._place :: self._degree]]
        inputs, labels = self._samples[0]
        mine += [(inputs, torch.full_like(labels, IGNORE_INDEX))] * (passes * rows - len(mine))
        size = rows // batches
        collated = (default_collate(mine[at : at + size]) for at in range(0, len(mine), size))
        stream = self.batch_generator(collated)
        return [list(itertools.islice(stream, batches)) for _ in range(passes)]


def elastic(config: Trainer.Config, *, microbatches: int = 0) -> ElasticTrainer.Config:
    """Returns the configuration with `ElasticTrainer` as its trainer."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return ElasticTrainer.Config(**fields, microbatches=microbatches)
