"""Microbatches of a step: how a batch is cut into them, and the rules of going through them."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline._base.shares import range_of
from paceline._base.sum_order import EVEN
from paceline._elastic.differences import difference
from paceline._elastic.gate import PendingStepWord
from paceline._elastic.step import Step
from paceline._group import Group
from paceline._links.base import Peer
from paceline._microbatch.attempt import AttemptPhase, StepAttempt
from paceline._microbatch.machine_bits import machine_words
from paceline._microbatch.rank_plan import RankPlan, usual_plan
from paceline.errors import PeerRaised, SettingsMismatch, StepOrderError, UnsupportedOp
from paceline.nn import Linear, softmax_cross_entropy
from paceline.testing import run_ranks
from paceline_protocol import StepFlag, step_word

X = np.random.default_rng(1).standard_normal((30, 5)).astype("f4")
T = np.arange(30) % 3


class Run:
    """One process that trains in microbatches."""

    def __init__(self, microbatches: int = 4, **settings: Any) -> None:
        self.session = paceline.join()
        self.model = Linear(5, 3, rng=np.random.default_rng(0))
        self.ddp = paceline.DDP(self.model, self.session.group, **settings)
        self.optimizer = paceline.optim.Adam(self.ddp, lr=0.1)
        self.sampler = paceline.ElasticSampler(30, global_batch=11, microbatches=microbatches)
        self.state = paceline.TrainState(model=self.ddp, optimizer=self.optimizer, sampler=self.sampler)

    def steps(self, inside: Callable[[Any], None], total: int = 1) -> None:
        """Trains; `inside` is what is done in each step."""
        with self.session:
            for step in self.session.steps(self.state, total=total):
                with step:
                    self.optimizer.zero_grad()
                    inside(step)

    def compute(self, micro: Any) -> None:
        _, dy = softmax_cross_entropy(self.ddp(X[micro.indices]), T[micro.indices])
        self.ddp.backward(dy)


@given(n=st.integers(1, 90), batch=st.integers(1, 40), microbatches=st.integers(1, 12), data=st.data())
@settings(deadline=None, max_examples=60)
def test_microbatches_add_up_to_the_batch_in_every_world(
    n: int, batch: int, microbatches: int, data: st.DataObject
) -> None:
    sampler = paceline.ElasticSampler(n, global_batch=batch, microbatches=microbatches)
    for step in range(data.draw(st.integers(0, 12))):
        whole = sampler.batch(step).tolist()
        shares = [sampler.current_microbatch(number) for number in range(microbatches)]
        assert [int(i) for indices, weight in shares if weight for i in indices] == whole
        for indices, weight in shares:
            assert weight == (len(indices) / len(whole) if weight else 0)
        world = data.draw(st.integers(1, microbatches))
        ranges = [range(*range_of(rank, world, microbatches)) for rank in range(world)]
        assert [number for of in ranges for number in of] == list(range(microbatches))
        assert all(ranges)
        sampler.advance(world)


def test_each_microbatch_has_its_own_samples_weight_and_rng() -> None:
    run = Run()
    drawn = []

    def inside(step: Any) -> None:
        for micro in step.microbatches:
            with micro:
                drawn.append(micro.rng.random())
                assert run.session.group._core.gradient_weight == micro.weight
                run.compute(micro)
        assert [micro.samples for micro in step.microbatches] == [2, 3, 3, 3]
        assert step.samples == 11
        run.optimizer.step()

    run.steps(inside, total=2)
    assert len(set(drawn)) == 8
    assert run.session.stats()["samples"] == 22


def test_rank_dependent_step_attributes_are_refused_with_microbatches() -> None:
    run = Run()

    def inside(step: Any) -> None:
        for name in ("indices", "weight", "rng"):
            with pytest.raises(UnsupportedOp, match="would depend on the number of workers"):
                getattr(step, name)

    run.steps(inside)
    plain = paceline.ElasticSampler(30, global_batch=11)
    with paceline.join() as session:
        for step in session.steps(paceline.TrainState(sampler=plain), total=1):
            with step, pytest.raises(UnsupportedOp, match=r"has no microbatches: make it with ElasticSampler"):
                _ = step.microbatches


def test_a_pass_outside_a_microbatch_is_refused() -> None:
    run = Run()
    with pytest.raises(StepOrderError, match="belong to none of them"):
        run.steps(lambda step: run.compute(step.microbatches[0]))


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_second_pass_in_a_microbatch_is_refused(number: int) -> None:
    run = Run()

    def inside(step: Any) -> None:
        for micro in step.microbatches:
            with micro:
                run.compute(micro)
                if micro.number == number:
                    run.compute(micro)

    with pytest.raises(StepOrderError, match=f"a second backward pass in microbatch {number}"):
        run.steps(inside)


def test_a_middle_microbatch_without_a_pass_is_refused() -> None:
    run = Run()

    def inside(step: Any) -> None:
        for micro in step.microbatches:
            with micro:
                if micro.number != 1:
                    run.compute(micro)

    with pytest.raises(StepOrderError, match="microbatch 1 had no backward pass, but microbatch 2 has one"):
        run.steps(inside)


def test_the_last_microbatch_without_a_pass_is_refused() -> None:
    run = Run()

    def inside(step: Any) -> None:
        for micro in step.microbatches:
            with micro:
                if micro.number != 3:
                    run.compute(micro)
        run.optimizer.step()

    with pytest.raises(StepOrderError, match="microbatch 3 had no backward pass, but those before it had one"):
        run.steps(inside)


@pytest.mark.parametrize("goes_through", [True, False])
def test_an_update_with_gradients_of_the_bare_model_is_refused(goes_through: bool) -> None:
    run = Run()
    before = run.model.weight.data.copy()

    def inside(step: Any) -> None:
        for micro in step.microbatches if goes_through else ():
            with micro:
                _, dy = softmax_cross_entropy(run.model.forward(X[micro.indices]), T[micro.indices])
                run.model.backward(dy * micro.weight)
        run.optimizer.step()

    with pytest.raises(StepOrderError, match="no wrapper has summed the microbatches of this step"):
        run.steps(inside)
    assert np.array_equal(run.model.weight.data, before)


def test_a_step_without_any_pass_leaves_the_model_unchanged() -> None:
    run = Run()
    before = run.model.weight.data.copy()
    run.steps(lambda step: None, total=2)
    assert np.array_equal(run.model.weight.data, before)


def test_a_second_update_without_a_second_sum_is_refused() -> None:
    run = Run()
    before = run.model.weight.data.copy()

    def inside(step: Any) -> None:
        step.keep_copy()
        for micro in step.microbatches:
            with micro:
                run.compute(micro)
        run.optimizer.step()
        run.optimizer.zero_grad()
        for micro in step.microbatches:
            with micro:
                _, dy = softmax_cross_entropy(run.model.forward(X[micro.indices]), T[micro.indices])
                run.model.backward(dy * micro.weight)
        run.optimizer.step()

    with pytest.raises(
        StepOrderError, match="a second update by this Adam, but no wrapper has summed the microbatches again"
    ):
        run.steps(inside)
    assert np.array_equal(run.model.weight.data, before)


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_a_collective_of_the_script_in_a_microbatch_is_refused(collective: str) -> None:
    run = Run()

    def inside(step: Any) -> None:
        run.session.group.barrier()
        with step.microbatches[0] as micro:
            run.compute(micro)
            getattr(run.session.group, collective)(np.ones(2))

    with pytest.raises(
        StepOrderError, match="a collective in microbatch 0 of a step: ranks have different numbers of microbatches"
    ):
        run.steps(inside)


def test_a_barrier_in_a_backward_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives pass there, since the wrapper calls them; barriers are the script's."""
    run = Run()
    backward = run.model.backward

    def waits(dy: Any) -> Any:
        run.session.barrier("here")
        return backward(dy)

    monkeypatch.setattr(run.model, "backward", waits)

    def inside(step: Any) -> None:
        with step.microbatches[0] as micro:
            run.compute(micro)

    with pytest.raises(StepOrderError, match="a barrier in microbatch 0 of a step"):
        run.steps(inside)


def test_a_collective_after_the_microbatches_is_allowed() -> None:
    run = Run()

    def inside(step: Any) -> None:
        for micro in step.microbatches:
            with micro:
                run.compute(micro)
        assert run.session.group.all_reduce(np.ones(2)).tolist() == [1, 1]
        run.optimizer.step()

    run.steps(inside, total=2)


def test_a_pass_of_the_previous_step_does_not_count_for_this_step() -> None:
    """The microbatches of the step before are no microbatches of this one, whatever their numbers are."""
    with paceline.join() as session:
        ddp = paceline.DDP(Linear(5, 3, rng=np.random.default_rng(0)), session.group)

        def compute(plan: RankPlan, number: int) -> None:
            attempt = StepAttempt(plan)
            turn = next(turn for turn in attempt.turns() if turn.number == number)
            attempt.phase, attempt.turn = AttemptPhase.COMPUTING, turn
            session.group._core.set_order(turn)
            _, dy = softmax_cross_entropy(ddp(X[:3]), T[:3])
            ddp.backward(dy)

        ddp.prepare()
        compute(RankPlan(4, 0, (1,), (((0, 4),),)), 1)
        for _, parameter in ddp.named_parameters():
            parameter.grad = None
        with pytest.raises(StepOrderError, match="microbatch 1 had no backward pass, but microbatch 2 has one"):
            compute(usual_plan(0, 1, 4), 2)
        session.group._core.set_order(EVEN)


class Quiet:
    """The runner of a step that nobody watches."""

    def word_completed(self, step: int) -> None:
        pass

    def about_to_change(self) -> None:
        pass

    def applied(self, step: int) -> None:
        pass


def two_wrappers(group: Group, given: Callable[[dict[str, paceline.DDP]], dict[str, Any]]) -> list[bytes]:
    """Two models in one loop over microbatches, two steps; returns their gradients."""
    ddps = {name: paceline.DDP(Linear(5, 3, rng=np.random.default_rng(i)), group) for i, name in enumerate("ab")}
    sampler = paceline.ElasticSampler(30, global_batch=11, microbatches=4)
    state = paceline.TrainState(sampler=sampler, **given(ddps))
    found = []
    for number in (1, 2):
        group._core.ban_collectives("")
        word = PendingStepWord(group, step_word(StepFlag(0), number, 0), number, with_gradients=False)
        with Step(number, 1, group, state._core, Quiet(), word, 0, 0) as step:  # type: ignore[arg-type]
            for micro in step.microbatches:
                with micro:
                    for ddp in ddps.values():
                        _, dy = softmax_cross_entropy(ddp(X[micro.indices]), T[micro.indices])
                        ddp.backward(dy)
            for ddp in ddps.values():
                for _, parameter in ddp.named_parameters():
                    found.append(parameter.grad.tobytes())
                    parameter.grad = None
    return found


def test_two_wrappers_in_one_loop_have_equal_gradients_in_every_world() -> None:
    """Ranks with one microbatch and ranks with two call the same collectives in the same order."""
    found = [of for world in (1, 2, 3, 4) for of in run_ranks(world, lambda group: two_wrappers(group, dict))]
    assert len(found[0]) == 8
    assert all(of == found[0] for of in found)


@pytest.mark.parametrize("world", [1, 3])
def test_wrappers_that_are_not_in_the_state_are_refused(world: int) -> None:
    """In no world it waits for the others: it would meet another collective."""

    def train(group: Group) -> str:
        with pytest.raises((StepOrderError, PeerRaised)) as caught:  # the error of this rank, or of the first
            two_wrappers(group, lambda ddps: {name: ddp.module for name, ddp in ddps.items()})
        return str(caught.value)

    texts = run_ranks(world, train)
    assert all("Give each wrapper itself to TrainState(...), or call its prepare() before" in text for text in texts)


def test_two_updates_in_a_step_go_through_the_microbatches_twice() -> None:
    run = Run()

    def inside(step: Any) -> None:
        step.keep_copy()
        for _ in range(2):
            run.optimizer.zero_grad()
            for micro in step.microbatches:
                with micro:
                    run.compute(micro)
            run.optimizer.step()

    run.steps(inside, total=2)
    assert run.state.step == 2


def test_an_update_before_the_last_microbatch_is_refused() -> None:
    run = Run()
    before = run.model.weight.data.copy()

    def inside(step: Any) -> None:
        for micro in step.microbatches[:2]:
            with micro:
                run.compute(micro)
        run.optimizer.step()

    with pytest.raises(StepOrderError, match="ends after microbatch 1, but this rank has microbatch 0 to microbatch 3"):
        run.steps(inside)
    assert np.array_equal(run.model.weight.data, before)


def test_reordered_or_nested_microbatches_are_refused() -> None:
    run = Run()

    def inside(step: Any) -> None:
        with (
            pytest.raises(StepOrderError, match="microbatch 1 begins, but it is the turn of microbatch 0"),
            step.microbatches[1],
        ):
            pass
        first, second = step.microbatches[:2]
        with first, pytest.raises(StepOrderError, match="one microbatch after the other"), second:
            pass
        run.compute(second)

    with pytest.raises(StepOrderError, match="belong to none of them"):
        run.steps(inside)


def test_gradients_present_before_the_first_microbatch_are_refused() -> None:
    run = Run()

    def inside(step: Any) -> None:
        run.model.bias.grad = np.ones(3, "f4")
        with step.microbatches[0] as micro:
            run.compute(micro)

    with pytest.raises(StepOrderError, match="parameter 'bias' has a gradient when microbatch 0 begins"):
        run.steps(inside)


def test_no_sync_in_a_microbatch_is_refused() -> None:
    run = Run()

    def inside(step: Any) -> None:
        with step.microbatches[0] as micro, run.ddp.no_sync():
            run.compute(micro)

    with pytest.raises(StepOrderError, match="no_sync"):
        run.steps(inside)


@pytest.mark.parametrize("compression", ["bf16", "int8", "powersgd"])
def test_compression_is_refused(compression: str) -> None:
    run = Run(compression=compression)

    def inside(step: Any) -> None:
        with step.microbatches[0] as micro:
            run.compute(micro)

    with pytest.raises(UnsupportedOp, match="which neither compression nor an engine keeps"):
        run.steps(inside)


def test_fsdp_and_ddp_give_equal_digests_in_microbatches() -> None:
    """Alone, with FSDP and with DDP: the whole states have one digest."""

    def digest(wrapper: Any) -> bytes:
        with paceline.join() as session:
            model = wrapper(Linear(5, 3, rng=np.random.default_rng(0)), session.group)
            optimizer = paceline.optim.Adam(model, lr=0.1)
            sampler = paceline.ElasticSampler(30, global_batch=11, microbatches=4)
            state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
            for step in session.steps(state, total=3):
                with step:
                    optimizer.zero_grad()
                    for micro in step.microbatches:
                        with micro:
                            _, dy = softmax_cross_entropy(model(X[micro.indices]), T[micro.indices])
                            model.backward(dy)
                    model.clip_grad_norm(0.1)
                    optimizer.step()
            return state.fingerprint()

    assert digest(paceline.FSDP) == digest(paceline.DDP)


def test_a_job_may_not_have_more_workers_than_microbatches() -> None:
    run = Run(microbatches=4)
    run.session.group._core.make_elastic(5)
    with pytest.raises(ValueError, match="too few for a job of at most 5 workers"):
        run.steps(lambda step: None)


def test_per_rank_batches_with_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match="with per_rank_batch: give global_batch"):
        paceline.ElasticSampler(30, per_rank_batch=4, microbatches=4)
    with pytest.raises(ValueError, match="microbatches must be at least 0"):
        paceline.ElasticSampler(30, global_batch=4, microbatches=-1)


def test_an_optimizer_step_inside_a_microbatch_is_refused() -> None:
    """An update inside of a microbatch would come at other times in other worlds."""
    run = Run(microbatches=1)

    def inside(step: Any) -> None:
        with step.microbatches[0] as micro:
            run.compute(micro)
            run.optimizer.step()

    with pytest.raises(StepOrderError, match=r"optimizer.step\(\) in microbatch 0"):
        run.steps(inside)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a kernel of OpenBLAS for x86")
def test_another_blas_kernel_changes_the_numpy_probe() -> None:
    code = "from paceline._microbatch.machine_bits import numpy_probe; print(numpy_probe().hex())"
    found = set()
    for kernel in ("", "Nehalem"):
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **({"OPENBLAS_CORETYPE": kernel} if kernel else {})}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 2


def test_the_manifest_includes_the_libraries_and_processor_digest() -> None:
    words = machine_words()
    assert words == machine_words()
    assert words["libraries"].startswith(f"numpy {np.__version__}")
    run = Run()
    manifest = run.state._core.manifest(**words)
    other = run.state._core.manifest(**{**words, "processor (digest of what it computes)": "0" * 16})
    donor = Peer(rank=0, member_id="m", host="here", address="here:1")
    found = difference(other, manifest, donor)
    assert isinstance(found, SettingsMismatch)
    assert "processor (digest of what it computes) is 0000000000000000 here but" in str(found)
    plain = paceline.ElasticSampler(30, global_batch=4, microbatches=4, same_bits=False)
    assert not plain.same_bits
    assert plain.settings["sampler same_bits"] is False
