"""How a loop over steps ends before its last step: on all ranks, or with an error that says who has left."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic.wrapping import WRAP

from paceline import checkpoint
from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.slow

CODE = (
    WRAP
    + """
MODE, _, HOW = os.environ["PACELINE_MODE"].partition("/")
x = np.ones((4, 4), np.float32)

def steps_of(session, state):
    steps = session.steps(state, total=100_000, checkpoint_dir=os.environ["PACELINE_FOLDER"])
    if HOW == "kept":
        session.kept = steps
    return (step for step in steps) if HOW == "wrapped" else steps

def run(session):
    wrapped, trained = wrap(paceline.nn.Linear(4, 4, rng=np.random.default_rng(0)), session.group)
    optimizer = paceline.optim.SGD(trained, lr=0.01)
    state = paceline.TrainState(model=trained, optimizer=optimizer)
    for step in steps_of(session, state):
        if MODE == "break-before" and step.number == 6:
            break
        with step:
            y = wrapped(x)
            optimizer.zero_grad()
            wrapped.backward(y)
            optimizer.step()
        if step.number == 5:
            if MODE == "stop" and step.rank == 1:
                session.stop()
            if MODE == "break-all" or (MODE == "break" and step.rank == 0):
                break
    return state.step

try:
    with paceline.join() as session:
        reached = run(session)
        if HOW == "exit":
            emit("over", step=reached)
            sys.exit(0)
    emit("over", step=reached)
except paceline.StepOrderError as error:
    emit("refused", text=str(error), ranks=error.ranks)
"""
)


def outcomes(mode: str, folder: Path, wrapper: str = "ddp") -> tuple[list[dict[str, object]], str]:
    """Returns the events of two workers, and the standard error of one that comes later."""
    environment = {"MIN_WORKERS": "2", "WRAPPER": wrapper, "MODE": mode, "FOLDER": str(folder)}
    with coordinator() as address:
        with workers(2, CODE, COORDINATOR=address, **environment) as started:
            told = [worker.expect_any(60.0) for worker in started]
            assert [worker.wait(60.0) for worker in started] == [0, 0]
        if any(each["event"] != "over" for each in told):
            return told, ""
        with workers(1, CODE, COORDINATOR=address, **environment) as (late,):
            assert late.wait(60.0) == 0, late.stderr
            return told, late.stderr


ENDS = [
    (mode, step, wrapper)
    for mode, step in [("stop", 6), ("break-all", 5), ("break-before", 5)]
    for wrapper in ("ddp", "full_shard")
]
WAYS = [(f"break-all/{how}", 5, "ddp") for how in ("wrapped", "kept", "exit")]


@pytest.mark.parametrize(("mode", "step", "wrapper"), [*ENDS, *WAYS])
def test_a_loop_that_ends_early_on_all_ranks_writes_a_checkpoint(
    mode: str, step: int, wrapper: str, tmp_path: Path
) -> None:
    told, late = outcomes(mode, tmp_path, wrapper)
    assert [(each["event"], each.get("step")) for each in told] == [("over", step)] * 2, told
    assert checkpoint.tags(tmp_path)[-1].step == step
    assert f"is done (step {step})" in late, "a worker that comes later has nothing to do"


@pytest.mark.parametrize(
    ("mode", "wrapper", "place"),
    [
        ("break", "ddp", "<string>:"),
        ("break", "full_shard", "<string>:"),
        ("break/wrapped", "ddp", "<string>:"),
        ("break/kept", "ddp", "in an unknown line"),
    ],
)
def test_a_break_on_one_rank_raises_step_order_error_on_all(
    mode: str, wrapper: str, place: str, tmp_path: Path
) -> None:
    told, _ = outcomes(mode, tmp_path, wrapper)
    for each in told:
        assert (each["event"], each["ranks"]) == ("refused", [0]), told
        assert "left the loop over the steps after step 5 of 100000 (" + place in str(each["text"])
        assert "session.stop() ends it on all ranks" in str(each["text"])
