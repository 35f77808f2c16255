"""Trains a model on several processes or machines, and training goes on when some of them die, freeze, join or leave.

    a place in a job       join, Session, Config, Credentials, once_per_host, run
    collectives, messages  Group, Work, Store
    the training loop      TrainState, ElasticSampler, Step, Microbatch, Dismissed
    models of NumPy        nn, optim, DDP, FSDP, ShardingStrategy, Module, Parameter
    checkpoints            checkpoint, sharded_state, load_sharded_state
    smaller gradients      compression
    tests                  testing
    errors                 PacelineError and its kinds, see paceline.errors
    imported by name       paceline.torch (DDP and FSDP of PyTorch), paceline.engines, paceline.launch

    with paceline.join() as session:
        total = session.group.all_reduce(array)

Importing this package imports neither grpc nor the command line: names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.errors import (
    CheckpointDamaged,
    CheckpointFailed,
    CollectiveMismatch,
    ConcurrentUse,
    CoordinatorUnreachable,
    DataWorkerLost,
    DivergenceError,
    ForkedSession,
    InvalidRank,
    InvalidWorldSize,
    LimitExceeded,
    LinkUnavailable,
    NotAuthenticated,
    NotPermitted,
    OperationTimeout,
    OrphanedError,
    PacelineError,
    PeerBrokeProtocol,
    PeerLost,
    PeerRaised,
    ReplicaLost,
    SessionClosed,
    SettingsMismatch,
    SizeMismatch,
    StaleGeneration,
    StepOrderError,
    StepSkipped,
    StepVoid,
    StoreConflict,
    TlsFailed,
    UnsupportedOp,
)
from pacelinepb import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline import checkpoint, compression, nn, optim, testing
    from paceline._base.processes import once_per_host
    from paceline._base.work import Work
    from paceline._elastic.join import join
    from paceline._elastic.sampler import ElasticSampler
    from paceline._elastic.session import Session
    from paceline._elastic.step import Step
    from paceline._elastic.train_state import TrainState
    from paceline._group import Group
    from paceline._microbatch.microbatch import Microbatch
    from paceline._parallel._data_parallel import DDP
    from paceline._parallel._fully_sharded import FSDP
    from paceline._parallel._parameter import Module, Parameter
    from paceline._parallel.sharding._holdings import load_sharded_state, sharded_state
    from paceline._parallel.sharding._placement import ShardingStrategy
    from paceline._session.store import Store
    from paceline.config import Config
    from paceline.credentials import Credentials
    from paceline.errors import Dismissed

    run: Callable[..., dict[int, Any]]  # it lies in a higher layer, from which nothing is imported here

__all__ = [
    "__version__",
    # sessions and groups
    "join",
    "Session",
    "Store",
    "Group",
    "Work",
    "Config",
    "Credentials",
    "once_per_host",
    # workers for a notebook's function
    "run",
    # training
    "DDP",
    "FSDP",
    "ShardingStrategy",
    "Module",
    "Parameter",
    "ElasticSampler",
    "TrainState",
    "Step",
    "Microbatch",
    "Dismissed",
    "sharded_state",
    "load_sharded_state",
    "checkpoint",
    "compression",
    "nn",
    "optim",
    # in-process ranks for tests
    "testing",
    # errors
    "CheckpointDamaged",
    "CheckpointFailed",
    "CollectiveMismatch",
    "ConcurrentUse",
    "CoordinatorUnreachable",
    "DataWorkerLost",
    "DivergenceError",
    "ForkedSession",
    "InvalidRank",
    "InvalidWorldSize",
    "LimitExceeded",
    "LinkUnavailable",
    "NotAuthenticated",
    "NotPermitted",
    "OperationTimeout",
    "OrphanedError",
    "PacelineError",
    "PeerBrokeProtocol",
    "PeerLost",
    "PeerRaised",
    "ReplicaLost",
    "SessionClosed",
    "SettingsMismatch",
    "SizeMismatch",
    "StaleGeneration",
    "StepOrderError",
    "StepSkipped",
    "StepVoid",
    "StoreConflict",
    "TlsFailed",
    "UnsupportedOp",
]

_HOME = {
    "join": "paceline._elastic.join",
    "Session": "paceline._elastic.session",
    "Store": "paceline._session.store",
    "Group": "paceline._group",
    "Work": "paceline._base.work",
    "Config": "paceline.config",
    "Credentials": "paceline.credentials",
    "once_per_host": "paceline._base.processes",
    "run": "paceline._notebook",
    "DDP": "paceline._parallel._data_parallel",
    "FSDP": "paceline._parallel._fully_sharded",
    "ShardingStrategy": "paceline._parallel.sharding._placement",
    "Module": "paceline._parallel._parameter",
    "Parameter": "paceline._parallel._parameter",
    "sharded_state": "paceline._parallel.sharding._holdings",
    "load_sharded_state": "paceline._parallel.sharding._holdings",
    "ElasticSampler": "paceline._elastic.sampler",
    "TrainState": "paceline._elastic.train_state",
    "Dismissed": "paceline.errors",
    "Step": "paceline._elastic.step",
    "Microbatch": "paceline._microbatch.microbatch",
}
_SUBMODULES = ("checkpoint", "compression", "nn", "optim", "testing")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"paceline.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
