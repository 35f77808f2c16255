"""In one process: mistakes that would go unnoticed are refused, with words that say what to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader, IterableDataset

from paceline.errors import StepOrderError, UnsupportedOp
from paceline_accelerate import Steps

pytestmark = [
    pytest.mark.needs(what="torch"),
    pytest.mark.newest,
    pytest.mark.filterwarnings("ignore"),  # accelerate's own
]


class Numbers(IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Script:
    """A user's objects, and the loop that most tests run."""

    def __init__(self, scaler: Any = None, **settings: Any) -> None:
        self.accelerator = Accelerator(cpu=True, **settings)
        self.accelerator.scaler = scaler
        model = torch.nn.Linear(2, 1)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), DataLoader([torch.ones(2)] * 8, 2)
        )

    def steps(self, **settings: Any) -> Steps:
        return Steps(self.accelerator, self.model, self.optimizer, self.loader, **{"epochs": 2, **settings})

    def backward(self, batch: Any) -> None:
        self.accelerator.backward(self.model(batch).mean())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, inside: Any, behind: Any = lambda batch: None) -> int:
        """Makes all steps, with a function for the block of a batch and one for what follows it."""
        with self.steps() as steps:
            for _ in steps.epochs():
                for batch in steps:
                    with steps.step:
                        inside(batch)
                    behind(batch)
        return steps.number


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate keeps its state for the life of a process."""
    for name in ("COORDINATOR", "JOB", "MIN_WORKERS", "MAX_WORKERS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_loop_of_the_other_tests_trains() -> None:
    script = Script()

    def inside(batch: Any) -> None:
        script.backward(batch)
        script.update()

    assert script.train(inside) == 8


@pytest.mark.parametrize("name", ["log", "save_state", "save_model", "check_trigger"])
def test_a_log_or_a_save_in_the_block_of_a_step(name: str) -> None:
    script = Script()
    with pytest.raises(StepOrderError, match=rf"accelerator.{name} belongs behind the block of a step"):
        script.train(lambda batch: getattr(script.accelerator, name)(*([{}] if name == "log" else [])))


@pytest.mark.parametrize("name", ["gather", "gather_for_metrics", "reduce", "pad_across_processes"])
def test_a_collective_in_the_block_of_a_step(name: str) -> None:
    script = Script()
    with pytest.raises(UnsupportedOp, match=rf"accelerator.{name} in the block of a step.*steps.loss"):
        script.train(lambda batch: getattr(script.accelerator, name)(batch))


@pytest.mark.parametrize("times", [0, 2])
def test_a_batch_without_a_backward_pass_or_with_two(times: int) -> None:
    script = Script()
    with pytest.raises(StepOrderError, match=f"was called {times} times for a batch of step 1: call it once"):
        script.train(lambda batch: [script.backward(batch) for _ in range(times)])


def test_a_step_without_an_update() -> None:
    script = Script()
    with pytest.raises(StepOrderError, match=r"no optimizer.step\(\) in step 1, whose gradients would be lost"):
        script.train(script.backward)


def test_accumulation_without_its_block() -> None:
    script = Script(gradient_accumulation_steps=2)
    with pytest.raises(StepOrderError, match=r"a step has 2 batches.*write `with steps.step, accelerator.accumulate"):
        script.train(script.backward)


def test_a_batch_outside_of_the_block() -> None:
    def use_no_block(steps: Steps) -> None:
        for _ in steps.epochs():
            for _ in steps:
                pass

    with Script().steps() as steps, pytest.raises(StepOrderError, match="a batch was not used in its step"):
        use_no_block(steps)


def test_an_epoch_that_is_left_before_its_end() -> None:
    def leave_at_once(script: Script, steps: Steps) -> None:
        for _ in steps.epochs():
            for batch in steps:
                with steps.step:
                    script.backward(batch)
                    script.update()
                break

    script = Script()
    with script.steps() as steps, pytest.raises(StepOrderError, match=r"epoch 0 was left before its end: .*max_steps"):
        leave_at_once(script, steps)


def test_a_shared_evaluation_outside_of_retry() -> None:
    script = Script()
    with script.steps() as steps, pytest.raises(StepOrderError, match=r"belongs in `for attempt in steps\.retry"):
        next(iter(steps.share(script.loader)))


def test_trackers_that_are_open_already(tmp_path: Any) -> None:
    script = Script()
    script.accelerator.trackers.append("a tracker")
    with pytest.raises(UnsupportedOp, match="init_trackers before `with Steps"):
        script.steps().__enter__()


def test_gradients_that_accumulate_over_the_end_of_an_epoch() -> None:
    script = Script(gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_with_dataloader=False))
    with pytest.raises(UnsupportedOp, match="sync_with_dataloader=False"):
        script.steps().__enter__()


def test_several_optimizers() -> None:
    script = Script()
    script.accelerator.prepare(torch.optim.SGD(script.model.parameters(), 0.1))
    with pytest.raises(UnsupportedOp, match="several optimizers"):
        script.steps().__enter__()


def test_the_last_step_is_max_steps() -> None:
    """It does not end an epoch, for schedulers that count epochs."""
    script, numbers = Script(), []
    with script.steps(max_steps=5) as steps:
        for epoch in steps.epochs():
            for batch in steps:
                with steps.step:
                    script.backward(batch)
                    script.update()
                    numbers.append((epoch, steps.number, steps.end_of_dataloader))
    assert numbers == [(0, 1, False), (0, 2, False), (0, 3, False), (0, 4, True), (1, 5, False)]


def test_a_gradient_scaler_does_what_it_does_alone() -> None:
    """accelerate keeps the optimizer's `step` as it was before the session guarded it."""

    def scaled() -> Script:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        script = Script(scaler)
        torch.nn.init.ones_(script.model.weight)
        return script

    alone, elastic = scaled(), scaled()
    for batch in [*alone.loader] * 2:
        alone.backward(batch)
        alone.update()

    def inside(batch: Any) -> None:
        elastic.backward(batch)
        elastic.update()

    elastic.train(inside)
    assert elastic.model.weight.equal(alone.model.weight)
    assert elastic.accelerator.scaler.get_scale() == alone.accelerator.scaler.get_scale() == 32.0


def test_a_loader_that_the_main_process_reads_for_all() -> None:
    script = Script()
    script.accelerator.prepare(DataLoader(Numbers()))
    with pytest.raises(UnsupportedOp, match=r"the main process reads for all .*: do not prepare it"):
        script.steps().__enter__()


def test_a_prepared_scheduler_that_is_not_given() -> None:
    script = Script()
    script.accelerator.prepare(torch.optim.lr_scheduler.StepLR(script.optimizer.optimizer, 1))
    with pytest.raises(UnsupportedOp, match="a prepared scheduler that is not given to Steps"):
        script.steps().__enter__()
