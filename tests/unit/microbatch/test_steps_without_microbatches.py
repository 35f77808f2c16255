"""A step without microbatches runs nothing of the package that has them."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
import paceline._microbatch
from paceline.nn import Linear, softmax_cross_entropy
from paceline.testing import run_ranks

PACKAGE = str(Path(paceline._microbatch.__file__).parent)
X, T = np.ones((8, 5), "f4"), np.arange(8) % 3


@contextmanager
def calls_counted() -> Iterator[Counter[str]]:
    """Counts calls of functions in the package, in this thread and those that begin inside the block."""
    found: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}"] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def train(wrapper: Any, **settings: Any) -> Counter[str]:
    """Three steps of one process; returns what it has called in the last two. The first one imports and builds."""
    with paceline.join() as session:
        model = wrapper(Linear(5, 3, rng=np.random.default_rng(0)), session.group)
        optimizer = paceline.optim.Adam(model, lr=0.1)
        sampler = paceline.ElasticSampler(8, global_batch=4, **settings)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        with ExitStack() as stack:
            for step in session.steps(state, total=3):
                if step.number == 2:
                    found = stack.enter_context(calls_counted())
                with step:
                    optimizer.zero_grad()
                    for batch in step.microbatches if settings else (step,):
                        with batch if settings else nullcontext():
                            _, dy = softmax_cross_entropy(model(X[batch.indices]), T[batch.indices])
                            model.backward(dy, batch.weight)
                    optimizer.step()
    return found


@pytest.mark.parametrize("wrapper", [paceline.DDP, paceline.FSDP])
def test_a_step_without_microbatches_calls_no_microbatch_code(wrapper: Any) -> None:
    assert train(wrapper) == {}
    assert train(wrapper, microbatches=2)


@pytest.mark.parametrize("wrapper", [paceline.DDP, paceline.FSDP])
def test_a_backward_pass_on_two_ranks_calls_no_microbatch_code(wrapper: Any) -> None:
    def compute(group: paceline.Group) -> Counter[str]:
        model = wrapper(Linear(5, 3, rng=np.random.default_rng(0)), group)
        model.prepare()
        with calls_counted() as found:
            for _ in range(2):
                _, dy = softmax_cross_entropy(model(X), T)
                model.backward(dy)
                for _, parameter in model.named_parameters():
                    parameter.grad = None
        return found

    assert run_ranks(2, compute) == [{}, {}]
