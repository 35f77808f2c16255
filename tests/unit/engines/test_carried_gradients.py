"""Gradients carried by an engine: links go first, errors are those of links, and nothing waits for a dead engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from unit.engines.fake_engine import FakeEngine, HangingEngine, makers

import paceline
from paceline import nn
from paceline._group import Group
from paceline._links.local import local_meshes
from paceline.config import Config
from paceline.engines import DataEngine, EngineFailed, EngineTraits, Ticket
from paceline.errors import (
    CollectiveMismatch,
    LimitExceeded,
    LinkUnavailable,
    PacelineError,
    PeerLost,
    PeerRaised,
    SettingsMismatch,
    UnsupportedOp,
)
from paceline.testing import local_groups, next_generation, run_groups
from paceline_protocol import Verdict
from pacelinepb.v1.errors_pb2 import ErrorReason

made: list[Any] = []


@pytest.fixture
def engine() -> Callable[[Callable[[], DataEngine]], Config]:
    """Makes a class of engines known as "test"; `made` has the engines that were made."""

    def know(make: Callable[[], DataEngine], **settings: Any) -> Config:
        def keep() -> DataEngine:
            made.append(make())
            return made[-1]

        makers["test"] = keep
        return Config(engine="test", **settings)

    made.clear()
    return know


def outcomes(groups: list[Group], call: Callable[[Group], Any]) -> list[Any]:
    """What each rank's call returned or raised."""

    def attempt(group: Group) -> Any:
        try:
            return call(group)
        except BaseException as error:  # noqa: BLE001  the test looks at it
            return error

    return run_groups(groups, attempt, timeout=20)


def carried(group: Group, n: int = 1000, **options: Any) -> tuple[Any, Any]:
    x, tail = np.full(n, group.rank + 1, np.float32), np.full(3, group.rank, np.float32)
    group._core.all_reduce_carried(x, tail, **options)
    return x, tail


def lost(groups: list[Group]) -> None:
    """Rank 1 is lost, says the coordinator."""
    for group in groups:
        verdict = Verdict(group.generation, ErrorReason.ERROR_REASON_PEER_LOST, (1,), 7, "rank 1 is lost")
        group._core.mesh.fault.settle(verdict)


def test_the_engine_sums_the_large_array_and_links_the_small_one(engine: Any) -> None:
    groups = local_groups(3, engine(FakeEngine))

    def rank(group: Group) -> tuple[Any, Any, int]:
        x, tail = carried(group, 1 << 20, divisor=lambda: 2.0)
        return x, tail, group.bytes_sent

    for x, tail, sent in run_groups(groups, rank):
        assert (x == 3).all(), "1 + 2 + 3, divided by 2"
        assert (tail == 3).all(), "0 + 1 + 2"
        assert sent < 10_000, "4 MiB went over links"


@pytest.mark.parametrize("in_background", [False, True])
def test_a_model_trains_over_an_engine_as_over_links(in_background: bool, engine: Any) -> None:
    def train(group: Group) -> list[Any]:
        rng = np.random.default_rng(1)
        model = nn.Sequential(nn.Linear(20, 30, rng=rng), nn.Linear(30, 3, rng=rng))
        ddp = paceline.DDP(model, group, bucket_mb=1e-3 if in_background else None)
        for step in range(3):
            x = np.random.default_rng([step, group.rank]).standard_normal((4 + group.rank, 20)).astype(np.float32)
            for parameter in dict(ddp.named_parameters()).values():
                parameter.grad = None
            ddp.backward(np.ones_like(ddp(x)) / len(x))
            for _, parameter in ddp.named_parameters():
                parameter.data -= 0.1 * parameter.grad
        return [parameter.data.copy() for _, parameter in ddp.named_parameters()]

    by_links = run_groups(local_groups(2, Config()), train)
    by_engine = run_groups(local_groups(2, engine(FakeEngine)), train)
    for mine, first, usual in zip(by_engine[1], by_engine[0], by_links[0], strict=True):
        assert mine.tobytes() == first.tobytes()
        np.testing.assert_allclose(mine, usual, rtol=1e-6)
    assert len(made) == 2
    assert made[0].sums == (3 * (2 if in_background else 1))


def test_a_mismatch_is_found_before_the_engine_starts(engine: Any) -> None:
    groups = local_groups(2, engine(FakeEngine))
    errors = outcomes(groups, lambda group: carried(group, 1000 + group.rank))
    assert [type(error) for error in errors] == [CollectiveMismatch] * 2, errors
    assert "fake=float32[1000]" in str(errors[0])
    assert "fake=float32[1001]" in str(errors[0])
    assert [each.sums for each in made] == [0, 0]


def test_a_verdict_ends_a_sum_that_hangs(engine: Any) -> None:
    groups = local_groups(2, engine(HangingEngine))

    def rank(group: Group) -> Any:
        group._core.open_engine()
        work = group._core.all_reduce_carried(np.ones(9), np.ones(3), async_op=True)
        if group.rank == 0:
            for each in made:
                assert each.started.wait(10)
            lost(groups)
        try:
            work.wait(10)
        except PacelineError as error:
            assert work.done()
            return error

    errors = outcomes(groups, rank)
    assert [type(error) for error in errors] == [PeerLost] * 2, errors
    assert {error.ranks for error in errors} == {(1,)}
    assert all(each.aborts for each in made)
    assert all(each.drained(0.0) for each in made)


class _Once(FakeEngine):
    def reopens(self) -> bool:
        return False


@pytest.mark.parametrize("make", [FakeEngine, _Once])
def test_a_failed_group_is_renewable_unless_the_engine_opens_once(engine: Any, make: Any) -> None:
    groups = local_groups(2, engine(make))

    def rank(group: Group) -> None:
        carried(group)
        group._core.check_renewable()  # nothing has failed
        group.barrier()
        lost([group])
        group._core.check_renewable()

    errors = outcomes(groups, rank)
    wanted = [PeerLost] * 2 if make is _Once else [type(None)] * 2
    assert [type(error) for error in errors] == wanted, errors


class _Breaks(FakeEngine):
    """Fails on rank 1, with nobody dead."""

    def all_reduce(self, x: Any) -> Ticket:
        if self.rank:
            raise EngineFailed("a socket was closed")
        return super().all_reduce(x)


def test_an_engine_that_fails_alone_is_reported_by_its_rank(engine: Any) -> None:
    groups = local_groups(2, engine(_Breaks, failure_timeout=0.3))
    first, second = outcomes(groups, carried)
    assert isinstance(second, LinkUnavailable)
    assert "the engine 'fake' has failed: a socket was closed" in str(second)
    assert isinstance(first, PeerRaised)
    assert first.ranks == (1,)


def test_an_engine_that_does_not_finish_in_time_is_aborted(engine: Any) -> None:
    groups = local_groups(2, engine(HangingEngine))
    errors = outcomes(groups, partial(carried, timeout=0.2))
    assert any(isinstance(error, LinkUnavailable) for error in errors), errors
    assert all(isinstance(error, PacelineError) for error in errors), errors
    assert all(each.drained(0.0) for each in made)


class _Interrupted(HangingEngine):
    """Ctrl-C comes while rank 0 waits, and an abort takes a moment."""

    def all_reduce(self, x: Any) -> Ticket:
        ticket = super().all_reduce(x)
        return ticket if self.rank else _InterruptedTicket(ticket)

    def abort(self) -> None:
        threading.Timer(0.05, super().abort).start()


class _InterruptedTicket(Ticket):
    def __init__(self, inner: Ticket) -> None:
        self.inner = inner

    def done(self) -> bool:
        return self.inner.done()

    def wait(self, deadline: float) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_makes_the_engine_release_the_array(engine: Any) -> None:
    groups = local_groups(2, engine(_Interrupted))
    let_go = {}

    def rank(group: Group) -> Any:
        try:
            carried(group)
        finally:
            let_go[group.rank] = all(each.drained(0.0) for each in made if each.rank == group.rank)

    first, second = outcomes(groups, rank)
    assert isinstance(first, KeyboardInterrupt)
    assert isinstance(second, PeerRaised), second
    assert let_go == {0: True, 1: True}, "the engine still had the array when the error was raised"


class _InterruptedTwice(_Interrupted):
    """Ctrl-C comes when the engine has the array but nobody has a ticket, and again during the abort."""

    interrupts = 2

    def all_reduce(self, x: Any) -> Ticket:
        super().all_reduce(x)
        raise KeyboardInterrupt

    def abort(self) -> None:
        if self.sums and self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        super().abort()


def test_repeated_interrupts_make_the_engine_release_the_array(engine: Any) -> None:
    groups = local_groups(1, engine(_InterruptedTwice))
    (group,) = groups
    carrier = _InterruptedTwice()
    carrier.open(0, group.members, 10.0)
    carrier.connect([carrier.contact(0.0)])
    group._core.bound.carrier = carrier
    with pytest.raises(KeyboardInterrupt):
        carried(group)
    assert carrier.interrupts == 0
    assert carrier.drained(0.0), "the engine still had the array when the error was raised"
    group.close()


def test_each_generation_has_an_engine_of_its_own(engine: Any) -> None:
    groups = local_groups(2, engine(FakeEngine))

    threads = [threading.Thread(target=carried, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for group in groups:
        group.hand_over()
    next_generation(groups)
    assert len(made) == 2
    with pytest.raises(EngineFailed):
        made[0].all_reduce(np.ones(3))
    assert all((x == 3).all() for x, _ in run_groups(groups, carried))
    assert len(made) == 4


def test_members_with_different_engines_raise_settings_mismatch(engine: Any) -> None:
    config = engine(FakeEngine)
    makers["other"] = HangingEngine
    first, second = local_meshes(2)
    groups = [Group(first, config), Group(second, Config(engine="other"))]
    errors = outcomes(groups, carried)
    assert all(isinstance(error, PacelineError) for error in errors), errors
    assert any(isinstance(error, SettingsMismatch) and "names the engine 'hanging'" in str(error) for error in errors)


def test_a_missing_package_of_an_engine_is_named(engine: Any) -> None:
    def make() -> DataEngine:
        raise ImportError("there is no nothing: pip install nothing")

    errors = outcomes(local_groups(2, engine(make)), carried)
    assert all(isinstance(error, LinkUnavailable) and "pip install nothing" in str(error) for error in errors), errors


class _OtherBits(FakeEngine):
    traits = EngineTraits(frozenset({"float32"}), same_bits=False)


def test_an_engine_that_may_give_ranks_different_bits_is_refused(engine: Any) -> None:
    errors = outcomes(local_groups(2, engine(_OtherBits)), carried)
    assert any(isinstance(error, UnsupportedOp) and "the same bits at all ranks" in str(error) for error in errors)
    assert not any(each.sums for each in made)


@pytest.mark.parametrize("contact", ["text", bytes((1 << 20) + 1)])
def test_a_contact_that_is_not_bytes_or_too_long_is_refused(
    contact: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = local_groups(2, engine(FakeEngine))
    own = FakeEngine.contact
    monkeypatch.setattr(FakeEngine, "contact", lambda self, by: contact if self.rank else own(self, by))
    errors = outcomes(groups, carried)
    assert all(isinstance(error, PacelineError) for error in errors), errors
    assert any(isinstance(error, LimitExceeded) and error.ranks == (1,) for error in errors), errors


def test_an_engine_is_refused_with_tls(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = local_groups(2, engine(FakeEngine))
    monkeypatch.setattr(type(groups[0]._core.mesh), "encrypted", True)
    errors = outcomes(groups, carried)
    assert all(isinstance(error, LinkUnavailable) and "TLS" in str(error) for error in errors), errors


def test_compression_over_an_engine_is_refused(engine: Any) -> None:
    (group,) = local_groups(1, engine(FakeEngine))
    with pytest.raises(UnsupportedOp, match="engine 'test': engines do not compress"):
        paceline.DDP(nn.Linear(2, 2, rng=np.random.default_rng(1)), group, compression="int8")
    group.close()


def test_a_world_of_one_opens_no_engine(engine: Any) -> None:
    (group,) = local_groups(1, engine(FakeEngine))
    assert group._core.open_engine() is None
    assert not made
    group.close()


def test_a_group_over_links_opens_no_engine() -> None:
    assert run_groups(local_groups(2), lambda group: group._core.open_engine()) == [None, None]


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no engine 'glue'; the engines are links, gloo"):
        Config.from_environment({"PACELINE_ENGINE": "glue"})
    assert Config.from_environment({"PACELINE_ENGINE": "gloo"}).engine == "gloo"
