"""What `join` makes of the environment, before anything is asked."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline._session.identity import JoinRequest
from paceline.config import Config
from paceline.errors import InvalidWorldSize, LinkUnavailable

TORCH = ("torch", "torch.distributed.rendezvous")


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A worker of torchrun that cannot import torch."""
    for name in ("PACELINE_COORDINATOR", "PACELINE_MIN_WORKERS", "PACELINE_MAX_WORKERS", "PACELINE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for name in TORCH:
        monkeypatch.setitem(sys.modules, name, None)
    return monkeypatch


def test_torchrun_workers_without_torch_do_not_train_alone(without_torch: pytest.MonkeyPatch) -> None:
    without_torch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        InvalidWorldSize, match=r"started 2 workers .*Install it \(pip install .*\); .*PACELINE_COORDINATOR"
    ):
        paceline.join()
    with paceline.join(rank=0, world_size=1) as session:  # as the text advises
        assert session.size == 1


@pytest.mark.parametrize("size", ["1", None])
def test_a_single_torchrun_worker_needs_no_torch(size: str | None, without_torch: pytest.MonkeyPatch) -> None:
    without_torch.setenv("WORLD_SIZE", size) if size else without_torch.delenv("WORLD_SIZE", raising=False)
    with paceline.join() as session:
        assert session.size == 1


def test_a_missing_engine_is_reported_before_the_coordinator_is_dialed(
    without_torch: pytest.MonkeyPatch,
) -> None:
    without_torch.setitem(sys.modules, "paceline.torch._gloo_engine", None)
    with pytest.raises(LinkUnavailable, match=r"the engine 'gloo' cannot be used, because .*: install torch"):
        paceline.join("127.0.0.1:1", config=Config(engine="gloo"), timeout=1.0)


def test_a_world_size_that_is_not_an_integer_is_refused(without_torch: pytest.MonkeyPatch) -> None:
    without_torch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be an integer"):
        paceline.join()


@pytest.mark.parametrize("explicit", [{"rank": 0, "world_size": 2}, {"rank": 0}])
def test_a_rank_of_a_replica_gets_its_replicas_number_from_the_coordinator(explicit: Any) -> None:
    group: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(ValueError, match="the coordinator gives replicas their numbers"):
        paceline.join(replica=group, **explicit)


def test_something_else_than_a_process_group_is_no_replica() -> None:
    group: Any = SimpleNamespace(size=lambda: 2)
    with pytest.raises(TypeError, match=r"join\(replica=...\) takes a (torch.distributed.ProcessGroup|process group)"):
        paceline.join(replica=group)


def test_a_rank_of_a_replica_registers_with_its_place_and_only_where_replicas_are_known() -> None:
    request = JoinRequest("job", 2, 3, None)
    plain = request.register("127.0.0.1:1", 3.0)
    request.mates = SimpleNamespace(position=1, size=2, id="ab" * 16, end=lambda error: None)
    register = request.register("127.0.0.1:1", 3.0)
    assert (register.replica_id, register.position, register.settings.replica_size) == ("ab" * 16, 1, 2)
    assert register.protocol_version == register.newest_protocol_version
    assert (plain.replica_id, plain.position, plain.settings.replica_size) == ("", 0, 0)
