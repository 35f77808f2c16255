"""`replicate`: averages gradients between replicas, whose ranks hold one copy by any parallelism of torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from paceline._elastic.session import Session
from paceline._group import Group
from paceline._parallel._optimizer_state import stands_in
from paceline.compression import Codec, PowerSGD
from paceline.torch._compiling import stay_out_of_graphs
from paceline.torch._lane_gradients import LaneDriver, reshard
from paceline.torch._tensors import Tensor

_MARK = "_paceline_replicated"
"""The attribute of a module that has its `Replicated`."""


def replicate(
    model: Any,
    session: Session | Group,
    *,
    bucket_mb: float | None = None,
    compression: str | Codec | PowerSGD | None = None,
    error_feedback: bool | None = None,
) -> Replicated:
    """Averages the gradients of a model between replicas from now on; the model itself stays as it is.

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["shard"])
        paceline.torch.replicate(model, session)
        state = paceline.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()), sampler=sampler)

    Call it when all of torch's wrappers are there, and before the `TrainState` is made. Each rank averages its own
    local gradients with the ranks that have the same position in the other replicas; `loss.backward()` returns when
    they are there. FSDP2, tensor and sequence parallelism, pipelines, torch's DDP and plain modules work, also
    together. The mean over replicas is weighted by their shares of the step's samples. So compute the loss as the mean
    over the replica's samples, whatever its ranks do together to compute it.

    A pipeline's schedule runs many backward passes. Let them accumulate, and reduce their sum:

        with replicated.no_sync():
            schedule.step(x)
        replicated.sync_gradients()

    In microbatches of the sampler both go inside `with micro:`.

    In `session.steps` a failure of the generation raises at `optimizer.step()`, on all ranks of a replica, and the step
    is undone. Until then the backward pass, clipping and what else comes before the update run to their ends, with
    gradients that mean nothing.

    Args:
        model: the part of the model that this rank has, with its wrappers.
        session: the session, or its group.
        bucket_mb: as for `paceline.DDP`.
        compression: as for `paceline.torch.DDP`.
        error_feedback: as for `paceline.DDP`.

    Returns:
        A handle, which need not be kept.

    Raises:
        ValueError: `bucket_mb` is not above 0.
        UnsupportedOp: there is no such codec, compression is asked of an engine, or parameters are on several devices.
    """
    return Replicated(
        model,
        session.group if isinstance(session, Session) else session,
        bucket_mb=bucket_mb,
        compression=compression,
        error_feedback=error_feedback,
    )


class Replicated:
    """A model whose gradients are averaged between replicas: what `replicate` returns.

    Attributes:
        module: the model.
        group: the ranks with this one's position, one in each replica.
    """

    def __init__(self, module: Any, group: Group, **settings: Any) -> None:
        stay_out_of_graphs()
        self.module = module
        self.group = group
        self._driver = LaneDriver(module, group, static_graph=False, **settings)
        self._synchronizer = self._driver.synchronizer
        setattr(module, _MARK, _Mark(self))

    def __repr__(self) -> str:
        return f"<Replicated {type(self.module).__name__}, replica {self.group.rank} of {self.group.size}>"

    def prepare(self) -> None:
        """Agrees on the model with the other replicas, and takes replica 0's values; `session.steps` calls it.

        This is a collective at first use, and again after a parameter was frozen or unfrozen; else it does nothing.

        Raises:
            SizeMismatch, SettingsMismatch, DivergenceError: the models differ; the error names replicas and parameter.
        """
        self._synchronizer.prepare()

    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context manager, inside of which backward passes accumulate in this replica only.

        The next pass outside, or `sync_gradients`, reduces the sum of all. In a microbatch of the sampler call
        `sync_gradients`, once. FSDP2 still reduces inside the replica in each pass, unless
        `set_requires_gradient_sync(False)` tells it not to.
        """
        return self._driver.no_sync()

    def sync_gradients(self) -> None:
        """Averages the gradients that are there between the replicas: those that passes in `no_sync` have left.

        Raises:
            PacelineError: a collective failed outside of `session.steps`.
        """
        self._driver.reduce()

    def begin_step(self) -> None:
        """Begins a step that may be undone; `session.steps` calls it."""
        reshard(self.module)
        self._driver.begin_step()

    def end_step(self) -> None:
        """Ends the block of a step; `session.steps` calls it. A failure of a reduction raises at once from now on."""
        self._driver.end_step()

    def drop_gradients(self) -> None:
        """Drops all gradients, because their step is undone; `session.steps` calls it."""
        self._driver.drop_gradients()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the module's parameters: those that it had when `replicate` was called."""
        for path, parameter in self._driver.module.named_parameters():
            yield path, parameter.tensor

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the module's buffers."""
        yield from self.module.named_buffers()


class _Mark:
    """A module's reference to its `Replicated`, which copies of the module do not get: they have other parameters."""

    def __init__(self, replicated: Replicated | None = None) -> None:
        self.replicated = replicated

    def __deepcopy__(self, memo: Any) -> _Mark:
        return _Mark()

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()


@stands_in
def _replicated(thing: Any) -> Replicated | None:
    """Returns what `replicate` has made of a module."""
    mark = getattr(thing, _MARK, None) if isinstance(thing, torch.nn.Module) else None
    return mark.replicated if isinstance(mark, _Mark) else None
