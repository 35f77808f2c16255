"""What users may do by mistake: nothing hangs, nothing ends well that is not."""

from __future__ import annotations

import pytest
from elastic.wrapping import WRAP, WRAPPERS

from paceline.testing import coordinator
from support.processes import Worker, workers

pytestmark = pytest.mark.slow

PRELUDE = (
    WRAP
    + """
import contextlib

rng = np.random.default_rng(0)
model = paceline.nn.Linear(4, 4, rng=rng)
x = np.ones((4, 4), np.float32)

def build(session):
    wrapped, trained = wrap(model, session.group)
    optimizer = paceline.optim.SGD(trained, lr=0.01)
    return wrapped, optimizer, paceline.TrainState(model=trained, optimizer=optimizer)

def compute(wrapped, optimizer):
    y = wrapped(x)
    optimizer.zero_grad()
    wrapped.backward(y)
"""
)


def outcomes(wrapper: str, code: str, *, least: int, world: int = 2) -> list[dict[str, object]]:
    """Returns the event that each worker tells."""
    environment = {"MIN_WORKERS": str(least), "MAX_WORKERS": str(world), "WRAPPER": wrapper}
    # All are in the first view, for which the coordinator waits.
    with (
        coordinator(settle_time=20.0) as address,
        workers(world, PRELUDE + code, COORDINATOR=address, **environment) as started,
    ):
        return [worker.expect_any(30.0) for worker in started]


CORRUPTING = """
with paceline.join() as session:
    wrapped, optimizer, state = build(session)
    odd, views, attempts = session.rank == 1, [], 0
    session.on_view(lambda: views.append(session.size))
    try:
        for step in session.steps(state, total=30):
            if odd and step.number in CORRUPT and attempts < step.number:
                attempts = step.number
                model.weight.data[0, 0] += 1.0  # between two steps, as a broken memory would
            with step:
                compute(wrapped, optimizer)
                optimizer.step()
        emit("done", odd=odd, step=state.step, weight=float(model.weight.data.sum()), views=len(views))
    except paceline.DivergenceError as error:
        emit("diverged", odd=odd, text=str(error))
"""


def test_a_diverged_member_takes_the_state_of_the_majority() -> None:
    told = outcomes("ddp", f"CORRUPT = (5, 12)\n{CORRUPTING}", least=3, world=3)
    assert [each["event"] for each in told] == ["done"] * 3, told
    assert [each["step"] for each in told] == [30] * 3
    assert len({each["weight"] for each in told}) == 1, told
    assert all(int(str(each["views"])) >= 3 for each in told), "each time a generation is over"


def test_a_repeatedly_diverging_member_raises_divergence_error() -> None:
    told = outcomes("ddp", f"CORRUPT = (5, 12, 18)\n{CORRUPTING}", least=2, world=3)
    by_event = {str(each["event"]): each for each in told}
    assert by_event["diverged"]["odd"], told
    assert "they differ in model 'weight'. This has happened 3 times" in str(by_event["diverged"]["text"])
    assert [each["event"] for each in told].count("done") == 2, told


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_steps_may_be_entered_again_after_an_error_between_them(wrapper: str) -> None:
    code = """
with paceline.join() as session:
    wrapped, optimizer, state = build(session)
    for _ in range(2):
        try:
            for step in session.steps(state, total=15):
                with step:
                    compute(wrapped, optimizer)
                    optimizer.step()
                if step.number == 5 and session.rank == 1 and not hasattr(session, "failed"):
                    session.failed = True
                    raise ValueError("once")
            break
        except ValueError:
            pass
    full = wrapped.unshard() if WRAPPER != "ddp" else contextlib.nullcontext(dict(model.named_parameters()))
    with full as parameters:
        emit("done", step=state.step, weight=float(parameters["weight"].data[0, 0]))
"""
    told = outcomes(wrapper, code, least=2)
    assert [each["step"] for each in told] == [15, 15]
    assert told[0]["weight"] == told[1]["weight"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_more_steps_after_a_finished_job_raise_step_order_error(wrapper: str) -> None:
    code = """
with paceline.join() as session:
    wrapped, optimizer, state = build(session)
    try:
        for total in (5, 10):
            for step in session.steps(state, total=total):
                with step:
                    compute(wrapped, optimizer)
                    optimizer.step()
        emit("done")
    except paceline.StepOrderError as error:
        emit_error(error)
"""
    for told in outcomes(wrapper, code, least=2):
        assert "its last step was 5, but 10 steps are asked for" in str(told.get("text")), told


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.sampled(2)
def test_leave_in_the_loop_closes_the_session_and_loses_its_shard(wrapper: str) -> None:
    code = """
session = paceline.join()
wrapped, optimizer, state = build(session)
met = False
try:
    for step in session.steps(state, total=1_000_000):
        with step:
            compute(wrapped, optimizer)
            optimizer.step()
        if session.size == 2 and session.rank == 1 and step.applied:
            session.leave()
        if met and session.size == 1:
            break
        met = session.size == 2
    emit("done", step=state.step)
except paceline.SessionClosed as error:
    emit("closed", step=state.step)
except paceline.OrphanedError as error:
    emit("orphaned", text=str(error))
"""
    told = {str(each["event"]): each for each in outcomes(wrapper, code, least=1)}
    if wrapper == "ddp":
        assert told.keys() == {"closed", "done"}
    else:  # its part was nobody else's, and no drain was asked for
        assert told.keys() == {"closed", "orphaned"}
        text = str(told["orphaned"]["text"])
        assert "part 1 of 2 of the state of step" in text
        assert "is lost with rank 1" in text
        assert "which left the job" in text


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_block_between_steps_that_always_fails_raises_step_void(wrapper: str) -> None:
    code = """
with paceline.join() as session:
    wrapped, optimizer, state = build(session)
    try:
        for step in session.steps(state, total=3):
            with step:
                compute(wrapped, optimizer)
                optimizer.step()
            for attempt in session.retry():
                with attempt:
                    session.group.all_reduce(np.ones(2 + session.rank))
    except paceline.StepVoid as error:
        emit_error(error)
"""
    for told in outcomes(wrapper, code, least=2):
        assert "a block between steps failed 5 times in a row" in str(told.get("text")), told


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_sigterm_waits_for_a_replacement_only_if_a_shard_would_be_lost(wrapper: str) -> None:
    code = """
import signal
with paceline.join() as session:
    wrapped, optimizer, state = build(session)
    try:
        for step in session.steps(state, total=100_000):
            with step:
                compute(wrapped, optimizer)
                optimizer.step()
            if step.number == 1:
                emit("began", rank=session.rank)
                if session.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
    except paceline.Dismissed as end:
        emit("dismissed", reason=end.reason)
"""
    environment = {"MIN_WORKERS": "2", "WRAPPER": wrapper}
    with coordinator() as address, workers(2, PRELUDE + code, COORDINATOR=address, **environment) as started:
        ranks: dict[object, Worker] = {worker.expect("began")["rank"]: worker for worker in started}
        if wrapper == "ddp":
            assert ranks[1].expect("dismissed")["reason"] == "SIGTERM"
            return
        with workers(1, PRELUDE + code, COORDINATOR=address, **environment) as (third,):
            assert ranks[1].expect("dismissed")["reason"] == "SIGTERM"
            assert third.process.poll() is None
