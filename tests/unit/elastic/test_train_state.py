"""All that training changes: undone, saved, compared and guarded as one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from unit.elastic.fakes import Counter, ForeignModel, ForeignOptimizer, Gate, Normed, framework

import paceline
from paceline._elastic.train_state import TrainState
from paceline.errors import SizeMismatch, UnsupportedOp
from paceline.testing import run_ranks


def make(seed: int = 0, **more: Any) -> tuple[TrainState, Normed, paceline.optim.Adam]:
    model = Normed(seed)
    optimizer = paceline.optim.Adam(model, lr=0.1)
    sampler = paceline.ElasticSampler(20, global_batch=6)
    return TrainState(model=model, optimizer=optimizer, sampler=sampler, **more), model, optimizer


def train(model: Normed, optimizer: paceline.optim.Adam) -> None:
    model.forward(np.ones((2, 4)))
    model.backward(np.ones((2, 3)))
    optimizer.step()


def bits(state: TrainState) -> Any:
    return json.dumps(state.state_dict(), default=lambda array: [str(array.dtype), array.tolist()])


def test_undo_restores_small_state_and_leaves_large_state() -> None:
    notes = {"n": np.zeros(1)}
    state, model, optimizer = make(notes=notes)
    small, weight = state._core.small(), model.linear.weight.data.copy()
    model.forward(np.ones((2, 4)))
    model.backward(np.ones((2, 3)))
    notes["n"] += 1
    optimizer.lr = 9
    assert state.sampler is not None
    state.sampler.advance(1)
    model.linear.weight.data[...] += 1
    state._core.undo(small)
    assert notes["n"] == 0
    assert optimizer.lr == 0.1
    assert state.sampler.state_dict() == {"epoch": 0, "offset": 0}
    assert not model.mean.any()
    assert all(p.grad is None for _, p in model.named_parameters())
    np.testing.assert_array_equal(model.linear.weight.data, weight + 1)


def test_a_loaded_state_equals_the_saved_one() -> None:
    state, model, optimizer = make(counter=Counter(3))
    train(model, optimizer)
    state._core.advance(1)
    saved = state.state_dict()
    other, its, _ = make(seed=5, counter=Counter())
    weight = its.linear.weight.data
    other.load_state_dict(saved)
    assert bits(other) == bits(state)
    assert other.fingerprint() == state.fingerprint()
    assert its.linear.weight.data is weight
    assert other.step == 1
    train(model, optimizer)
    assert bits(other) != bits(state)
    assert saved["step"] == 1
    np.testing.assert_array_equal(saved["parts"]["model"]["arrays"]["weight"], weight, "what was saved is a copy")


def test_a_state_dict_that_does_not_fit_changes_nothing() -> None:
    class Stubborn(Counter):
        def load_state_dict(self, saved: dict[str, Any]) -> None:
            if saved["value"] == 13:
                raise RuntimeError("not that one")
            super().load_state_dict(saved)

    state, model, optimizer = make(notes={"n": 1}, last=Stubborn(1))
    train(model, optimizer)
    before = bits(state)

    def damaged(change: Any) -> Any:
        other, its, other_optimizer = make(seed=3, notes={"n": 2}, last=Counter(2))
        train(its, other_optimizer)
        train(its, other_optimizer)
        other._core.advance(1)
        saved = other.state_dict()
        change(saved["parts"])
        return saved

    def wrong_shape(parts: Any) -> None:
        parts["optimizer"]["arrays"]["bias/mean"] = np.zeros(99)

    def wrong_buffer(parts: Any) -> None:
        parts["model"]["rest"]["buffers"]["mean"] = np.zeros(99)

    def wrong_place(parts: Any) -> None:
        parts["sampler"]["rest"]["state"]["offset"] = 10**6

    def wrong_name(parts: Any) -> None:
        parts["optimizer"]["rest"]["settings"]["nonsense"] = 1.0

    def refused_by_its_own(parts: Any) -> None:
        parts["last"]["rest"]["state"]["value"] = 13

    def one_part_less(parts: Any) -> None:
        del parts["last"]

    for change, error, says in (
        (wrong_shape, SizeMismatch, "optimizer: .*bias/mean is"),
        (wrong_buffer, SizeMismatch, "mean is"),
        (wrong_place, ValueError, "not a position in 20 samples"),
        (wrong_name, SizeMismatch, "Adam"),
        (refused_by_its_own, RuntimeError, "not that one"),
        (one_part_less, SizeMismatch, "last on one side only"),
    ):
        with pytest.raises(error, match=says):
            state.load_state_dict(damaged(change))
        assert bits(state) == before, change.__name__
    state.load_state_dict(damaged(lambda parts: None))
    assert bits(state) != before


def test_round_trip_check_refuses_unserializable_values() -> None:
    state, _, _ = make(extra=Counter({1, 2}))
    with pytest.raises(UnsupportedOp, match="is a set"):
        state._core.check_round_trip()


def test_round_trip_check_names_a_value_that_changes_on_load() -> None:
    class Forgetful(Counter):
        def load_state_dict(self, saved: dict[str, Any]) -> None:
            self.value = np.zeros(2)

    state, _, _ = make(extra=Forgetful(np.ones(2)))
    with pytest.raises(UnsupportedOp, match=r"state of extra differs at state\.value after it was saved"):
        state._core.check_round_trip()


def test_a_passed_round_trip_check_changes_nothing() -> None:
    with framework():
        model = ForeignModel()
        state = TrainState(model=model, optimizer=ForeignOptimizer(model), values={"f": np.float32(2), "t": (1, None)})
        before = state.fingerprint()
        state._core.check_round_trip()
        assert state.fingerprint() == before


def test_costly_small_state_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    state = TrainState(big={"a": np.zeros(1 << 18)})
    state._core.check_round_trip()
    assert "big has no step() of its own: its 2.1 MB are copied in every step" in caplog.text


def test_guard_gates_optimizer_steps_until_unguard() -> None:
    state, model, optimizer = make()
    gate = Gate()
    state._core.guard(gate)
    state._core.guard(gate)  # again: once is enough
    train(model, optimizer)
    assert (gate.opened, gate.spoiled) == (1, 0)
    state._core.unguard()
    state._core.unguard()
    train(model, optimizer)
    assert gate.opened == 1
    assert "step" not in vars(optimizer)


def test_a_refusing_gate_blocks_the_update() -> None:
    def refuse() -> None:
        raise ConnectionError("void")

    state, model, optimizer = make()
    gate = Gate(refuse)
    state._core.guard(gate)
    before = model.linear.weight.data.copy()
    with pytest.raises(ConnectionError, match="void"):
        train(model, optimizer)
    np.testing.assert_array_equal(model.linear.weight.data, before)
    assert gate.spoiled == 0


def test_an_interrupted_update_spoils_the_gate() -> None:
    class Halting(ForeignOptimizer):
        def step(self) -> None:
            raise KeyboardInterrupt

    optimizer = Halting(ForeignModel())
    gate = Gate()
    state = TrainState(optimizer=optimizer)
    state._core.guard(gate)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert (gate.opened, gate.spoiled) == (1, 1)


def test_an_optimizer_under_two_names_is_guarded_once() -> None:
    generator, critic = Normed(1), Normed(2)
    first, second = paceline.optim.Adam(generator), paceline.optim.SGD(critic, lr=1.0)
    state = TrainState(generator=generator, critic=critic, first=first, second=second, again=first)
    gate = Gate()
    state._core.guard(gate)
    first.step()
    second.step()
    assert gate.opened == 2
    state._core.unguard()
    assert "step" not in vars(first)


def test_unguard_restores_an_instance_step_method() -> None:
    optimizer = ForeignOptimizer(ForeignModel())
    own = lambda: None  # noqa: E731  as schedulers do
    optimizer.step = own  # type: ignore[method-assign]
    state = TrainState(optimizer=optimizer)
    state._core.guard(Gate())
    assert optimizer.step is not own
    state._core.unguard()
    assert optimizer.step is own


def test_two_samplers_are_refused() -> None:
    with pytest.raises(UnsupportedOp, match="one sampler"):
        TrainState(a=paceline.ElasticSampler(4, 2), b=paceline.ElasticSampler(4, 2))


def test_manifests_differ_by_model_shape_sampler_and_settings() -> None:
    def manifest(width: int = 3, batch: int = 6, lr: float = 0.1, **settings: Any) -> bytes:
        model = Normed(width=width)
        parts = {"model": model, "optimizer": paceline.optim.Adam(model, lr=lr)}
        return TrainState(**parts, sampler=paceline.ElasticSampler(20, global_batch=batch))._core.manifest(**settings)

    assert manifest(total=5) == manifest(total=5)
    assert len({manifest(total=5), manifest(total=6), manifest(4, total=5), manifest(batch=7, total=5)}) == 4
    assert json.loads(manifest())["settings"]["sampler global_batch"] == "6"


def test_fingerprint_depends_on_values_but_not_on_key_order() -> None:
    def of(**values: Any) -> bytes:
        return TrainState(values=values).fingerprint()

    a, b = np.arange(6.0), np.ones(2)
    assert of(a=a, b=b) == of(b=b, a=a)
    different = [of(a=a, b=b), of(a=a + 1, b=b), of(a=a, c=b), of(a=a.reshape(2, 3), b=b), of(a=a.astype(int), b=b)]
    assert len(set(different)) == len(different)
    assert of(a=np.zeros(0)) != of(a=np.zeros(0, int))


def test_only_sharded_states_require_the_fsdp_wrapper() -> None:
    strategies = list(paceline.ShardingStrategy)

    def rank(group: Any) -> list[str]:
        said = []
        for strategy in strategies:
            model = Normed()
            nodes = 2 if strategy is paceline.ShardingStrategy.HYBRID_SHARD and group.size > 1 else None
            fsdp = paceline.FSDP(model, group, strategy, nodes)
            for parts in ({"model": fsdp}, {"model": model}, {"optimizer": paceline.optim.Adam(fsdp)}):
                try:
                    TrainState(**parts)._core.check_round_trip()
                    said.append("")
                except UnsupportedOp as error:
                    said.append(str(error))
        return said

    for world in (1, 2):
        for said in run_ranks(world, rank):
            for n, text in enumerate(said):
                strategy = strategies[n // 3]
                if world == 1 or strategy is paceline.ShardingStrategy.NO_SHARD or n % 3 == 0:
                    assert not text
                else:
                    assert "give the FSDP wrapper to the training state" in text
