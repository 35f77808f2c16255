"""`PacelineConfig`: Ray Train starts workers and replaces those that die, and the others train on meanwhile.

Ray's controller replaces single workers for a backend whose workers are replica groups, as it does for torchft. This
backend runs a coordinator in the controller's process and tells each worker how to join. It depends on internals of
Ray Train, those of 2.60.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils, set_train_fn_utils
from ray.train.v2._internal.execution.training_report import _TrainingReport
from ray.train.v2._internal.execution.worker_group import ReplicaGroup, WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.worker import WorkerStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline import Dismissed
from paceline.launch import WorkerSettings, own_coordinator, worker_environment
from paceline_ray._reports import ReportDesk, Reporter, use_reporter

_GONE_S = 120.0
"""Seconds after which members that nobody hears are declared dead, if all are gone; as for `paceline_ray.run`."""


class PacelineConfig(TorchConfig):  # type: ignore[misc]
    """Lets the workers of a Ray `TorchTrainer` die and be replaced without a restart of the others.

        trainer = TorchTrainer(
            train,
            torch_config=paceline_ray.PacelineConfig(min=2),
            scaling_config=ScalingConfig(num_workers=4),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
        )

    The training function calls `paceline.join()`, which finds the job, and trains in `session.steps`. If a worker dies
    or raises, the others go on in the same step. Ray starts another worker in its place, which takes the state from the
    others. Each poll that finds failures counts once in `max_failures`. If all workers fail at once, Ray starts all of
    them again, and they continue from the `checkpoint_dir` of `session.steps`.

    Args:
        min: the workers wait when fewer of them are left. The most is the `num_workers` of Ray's `ScalingConfig`.
        job: name of the job, as `paceline status` on the driver's node shows it.
    """

    def __init__(self, *, min: int = 1, job: str = "train") -> None:
        super().__init__(backend="paceline")
        self.min, self.job = min, job

    @property
    def backend_cls(self) -> type[Backend]:
        """The class that Ray's controller starts workers with."""
        return _PacelineBackend

    @property
    def train_func_context(self) -> Callable[[], Any]:
        """The context in which Ray calls the training function."""
        return _dismissed_is_a_good_end(super().train_func_context)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings that Ray shows."""
        return {"min": self.min, "job": self.job}


def _dismissed_is_a_good_end(inner: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a context in which a worker that is not needed any more ends like one that has finished."""

    @contextmanager
    def context() -> Iterator[None]:
        with inner(), suppress(Dismissed):
            yield

    return context


class _PacelineBackend(Backend):  # type: ignore[misc]
    """The controller's side; Ray makes it in the driver and sends it to the controller."""

    has_replica_groups = True

    def __init__(self) -> None:
        self._group: Any = None
        self._settings: WorkerSettings | None = None
        self._reporter: Reporter | None = None
        self._coordinator = ExitStack()
        self._asks = False  # True while it asks which workers are alive

    def on_start(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        """Tells workers how to join: all of a new group, or one that replaces another."""
        replaces = isinstance(worker_group, ReplicaGroup)
        if not replaces:
            self._begin(worker_group, backend_config)
        try:
            worker_group.execute(_enter_job, self._settings, self._reporter)
        except RayActorError as error:  # Ray tries again after this one
            raise WorkerGroupStartupFailedError("a worker died before it could join the job") from error
        if replaces:  # its start takes seconds
            self._end_others_that_died(worker_group)

    def on_shutdown(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        """Ends the coordinator with the group."""
        if not isinstance(worker_group, ReplicaGroup):
            self._coordinator.close()
        elif not self._asks and not self._end_others_that_died(worker_group):
            # No worker is left. The coordinator would wait for them, and their replacements with it.
            self._start_coordinator(backend_config)

    def _begin(self, worker_group: Any, config: PacelineConfig) -> None:
        """Makes what a new group of workers needs."""
        workers = len(worker_group)
        if not 1 <= config.min <= workers:
            raise ValueError(f"PacelineConfig(min=...) must be 1 to num_workers ({workers}), not {config.min}")
        if self._reporter is None:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            desk = ray.remote(num_cpus=0)(ReportDesk).options(scheduling_strategy=here).remote()
            self._reporter = Reporter(desk, uuid.uuid4().hex[:8])
        self._group = worker_group
        self._start_coordinator(config)
        (handler,) = (each for each in worker_group._callbacks if isinstance(each, ReportCallbackHandler))
        delivery = _Delivery(self._reporter.desk, handler, workers)
        worker_group._callbacks = [*worker_group._callbacks, delivery]

    def _start_coordinator(self, config: PacelineConfig) -> None:
        """Starts a coordinator in place of an earlier one, so that no worker of an earlier group can join."""
        self._coordinator.close()
        listen = f"{ray.util.get_node_ip_address()}:0"
        served = self._coordinator.enter_context(own_coordinator(listen=listen, restart_after=_GONE_S))
        self._settings = WorkerSettings(served.address, config.job, config.min, len(self._group), token=served.token)

    def _end_others_that_died(self, replaced: Any) -> bool:
        """Shuts down other workers that have died too; returns whether any is alive.

        Ray 2.60 calls each worker that was not shut down before it replaces one, and gives the run up if a call fails.
        It finds the workers that are shut down here when it polls next, and replaces them then.
        """
        self._asks = True
        try:
            others = [each for each in self._group.get_replica_groups() if each is not replaced and each.is_active()]
            for group, answer in [(each, each.execute_async(os.getpid)) for each in others]:
                try:
                    ray.get(answer)
                except RayActorError:
                    group.shutdown()  # which calls `on_shutdown` again
            return any(each.is_active() for each in others)
        finally:
            self._asks = False


class _Delivery(WorkerGroupCallback):  # type: ignore[misc]
    """Takes reports from the desk whenever the controller polls, and hands them on as if all workers had made them."""

    def __init__(self, desk: Any, handler: Any, workers: int) -> None:
        self._desk, self._handler, self._ranks = desk, handler, range(workers)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Called by the controller."""
        self._deliver()

    @contextmanager
    def on_worker_group_shutdown(self) -> Iterator[None]:
        """Called by the controller."""
        self._deliver()
        yield

    def _deliver(self) -> None:
        for each in ray.get(self._desk.take.remote()):
            told = _TrainingReport(checkpoint=each.checkpoint, metrics=dict(each.metrics), validation=False)
            status = WorkerStatus(running=True, training_report=told)
            self._handler.after_worker_group_poll_status(WorkerGroupPollStatus(dict.fromkeys(self._ranks, status)))


class _WithoutBarriers(DistributedTrainFnUtils):  # type: ignore[misc]
    """Refuses those functions of `ray.train` that wait for a fixed number of workers, or for their reports."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "with PacelineConfig, ray.train.report, get_all_reported_checkpoints, get_preemption_info and "
            "ray.train.collective would wait for workers that have died: use paceline_ray.report(session, step, "
            "metrics), and the collectives of session.group"
        )

    report = barrier = broadcast_from_rank_zero = get_preemption_info = get_all_reported_checkpoints = _refuse


def _enter_job(settings: WorkerSettings, reporter: Reporter) -> None:
    """Runs in a worker's process before the training function does: `paceline.join()` finds the job there."""
    place = replace(settings, advertise=ray.util.get_node_ip_address())
    environment = worker_environment(os.environ, place, index=ray.train.get_context().get_local_rank())
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    use_reporter(reporter)
    set_train_fn_utils(_WithoutBarriers())
