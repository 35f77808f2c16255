"""What users may do by mistake: nothing hangs, nothing ends well that is not."""

from __future__ import annotations

import pytest

from paceline.testing import coordinator
from support.processes import Worker, workers

pytestmark = pytest.mark.slow

PRELUDE = """
rng = np.random.default_rng(0)
model = paceline.nn.Linear(4, 4, rng=rng)
x = np.ones((4, 4), np.float32)

def build(session):
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.SGD(model, lr=0.01)
    return ddp, optimizer, paceline.TrainState(model=model, optimizer=optimizer)

def compute(ddp, optimizer):
    y = ddp(x)
    optimizer.zero_grad()
    ddp.backward(y)
"""


def outcomes(
    world: int, code: str, *, least: int, events: int = 1, timeout: float = 20.0
) -> list[list[dict[str, object]]]:
    """What each of the workers tells."""
    bounds = {"MIN_WORKERS": str(least), "MAX_WORKERS": str(world)}
    with (
        coordinator() as address,
        workers(world, PRELUDE + code, COORDINATOR=address, **bounds) as started,
    ):
        return [[worker.expect_any(timeout) for _ in range(events)] for worker in started]


def test_a_member_that_skips_an_update_ends_it_for_all() -> None:
    code = """
with paceline.join() as session:
    ddp, optimizer, state = build(session)
    try:
        for step in session.steps(state, total=30):
            with step:
                compute(ddp, optimizer)
                if not (step.rank == 1 and step.number == 5):
                    optimizer.step()
        emit("done")
    except paceline.DivergenceError as error:
        emit("diverged", step=step.number, text=str(error))
"""
    for (told,) in outcomes(2, code, least=2):
        assert told["event"] == "diverged", told
        assert told["step"] == 6


def test_steps_again_after_an_error_between_them() -> None:
    code = """
with paceline.join() as session:
    ddp, optimizer, state = build(session)
    for _ in range(2):
        try:
            for step in session.steps(state, total=15):
                with step:
                    compute(ddp, optimizer)
                    optimizer.step()
                if step.number == 5 and session.rank == 1 and not hasattr(session, "failed"):
                    session.failed = True
                    raise ValueError("once")
            break
        except ValueError:
            pass
    emit("done", step=state.step, weight=float(model.weight.data[0, 0]))
"""
    told = [each for (each,) in outcomes(2, code, least=2)]
    assert [each["step"] for each in told] == [15, 15]
    assert told[0]["weight"] == told[1]["weight"]


def test_more_steps_than_a_job_that_is_done_had() -> None:
    code = """
with paceline.join() as session:
    ddp, optimizer, state = build(session)
    try:
        for total in (5, 10):
            for step in session.steps(state, total=total):
                with step:
                    compute(ddp, optimizer)
                    optimizer.step()
        emit("done")
    except paceline.StepOrderError as error:
        emit_error(error)
"""
    for (told,) in outcomes(2, code, least=2):
        assert "its last step was 5, and 10 are asked for" in str(told.get("text")), told


def test_leaving_inside_a_step() -> None:
    code = """
session = paceline.join()
ddp, optimizer, state = build(session)
try:
    for step in session.steps(state, total=30):
        with step:
            compute(ddp, optimizer)
            optimizer.step()
        if step.number == 4 and session.rank == 1 and session.size == 2:
            session.leave()
    emit("done", step=state.step)
except paceline.SessionClosed as error:
    emit("closed", step=state.step)
"""
    assert sorted(str(each["event"]) for (each,) in outcomes(2, code, least=1)) == ["closed", "done"]


def test_a_block_between_steps_that_always_fails() -> None:
    code = """
with paceline.join() as session:
    ddp, optimizer, state = build(session)
    try:
        for step in session.steps(state, total=3):
            with step:
                compute(ddp, optimizer)
                optimizer.step()
            for attempt in session.retry():
                with attempt:
                    session.group.all_reduce(np.ones(2 + session.rank))
    except paceline.StepVoid as error:
        emit_error(error)
"""
    for (told,) in outcomes(2, code, least=2):
        assert "a block between steps failed 5 times in a row" in str(told.get("text")), told


def test_a_notice_to_leave_does_not_wait_for_a_replacement() -> None:
    code = """
import signal
with paceline.join() as session:
    ddp, optimizer, state = build(session)
    if session.rank == 1:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    try:
        for step in session.steps(state, total=100_000):
            with step:
                compute(ddp, optimizer)
                optimizer.step()
            if step.number == 1:
                emit("began", rank=session.rank)
    except paceline.Dismissed as end:
        emit("dismissed", reason=end.reason)
"""
    with coordinator() as address, workers(2, PRELUDE + code, COORDINATOR=address, MIN_WORKERS="2") as started:
        ranks: dict[object, Worker] = {worker.expect("began")["rank"]: worker for worker in started}
        assert ranks[1].expect("dismissed")["reason"] == "SIGTERM"
