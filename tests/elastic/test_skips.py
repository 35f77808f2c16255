"""Steps that a rank, or all ranks, leave out: they are skipped on all, or it is an error on all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from elastic.wrapping import WRAP

from paceline.testing import coordinator
from support.processes import workers

pytestmark = pytest.mark.slow

TOTAL, BATCH, SAMPLES = 6, 8, 48

CODE = (
    WRAP
    + f"""
MODE, AT = os.environ["PACELINE_MODE"], int(os.environ["PACELINE_AT"])
x = np.random.default_rng(0).normal(size=({SAMPLES}, 4)).astype(np.float32)

def train(step, wrapped, optimizer):
    alone, mine = step.number == AT and step.rank == 1, step.number == AT
    optimizer.zero_grad()
    if (MODE == "before" and alone) or (MODE == "all" and mine):
        return
    if mine and MODE in ("skip", "skip-all"):
        session.group.barrier()  # all are in this step: one in the step before would not get this one from its loop
        if alone or MODE == "skip-all":
            step.skip()
    y = wrapped(x[step.indices])
    wrapped.backward(y, step.weight)
    if MODE == "after" and alone:
        return
    if MODE == "late" and alone:
        open(os.environ["PACELINE_PIPE"]).close()  # rank 0 has made its update: before it, all would skip the step
        step.skip()
    optimizer.step()
    if MODE == "late" and mine:
        open(os.environ["PACELINE_PIPE"], "w").close()

with paceline.join() as session:
    wrapped, trained = wrap(paceline.nn.Linear(4, 4, rng=np.random.default_rng(0)), session.group)
    optimizer = paceline.optim.SGD(trained, lr=0.01)
    state = paceline.TrainState(model=trained, optimizer=optimizer, sampler=paceline.ElasticSampler({SAMPLES}, {BATCH}))
    told = []
    try:
        for step in session.steps(state, total={TOTAL}):
            with step:
                train(step, wrapped, optimizer)
            told.append((step.number, step.applied, step.skipped))
        counted = session.stats()
        full = wrapped.unshard() if WRAPPER != "ddp" else None
        values = full.__enter__()["weight"].data if full is not None else trained.weight.data
        emit("done", told=told, weight=values.tobytes().hex(), skipped=counted["skipped"], samples=counted["samples"],
             left_out=counted["skipped_samples"], step=state.step)
    except paceline.StepOrderError as error:
        emit("refused", text=str(error), ranks=error.ranks, held=state.step)
"""
)


def outcomes(mode: str, at: int, wrapper: str = "ddp", world: int = 2, pipe: str = "") -> list[dict[str, object]]:
    """Returns the event that each worker tells."""
    environment = {"MIN_WORKERS": str(world), "WRAPPER": wrapper, "MODE": mode, "AT": str(at), "PIPE": pipe}
    with coordinator() as address, workers(world, CODE, COORDINATOR=address, **environment) as started:
        return [worker.expect_any(60.0) for worker in started]


@pytest.mark.parametrize(
    ("mode", "at", "wrapper", "world"),
    [
        ("before", 1, "ddp", 2),  # the word travels alone in the first step
        ("before", 4, "ddp", 3),  # and with gradients in the others
        ("after", 4, "ddp", 2),
        ("after", TOTAL, "ddp", 2),  # no word of a next step follows
        ("before", 4, "full_shard", 2),
        ("after", TOTAL, "full_shard", 2),
        ("before", 4, "hybrid_shard", 4),  # the others wait in a group of two
    ],
)
def test_a_rank_that_leaves_out_a_step_alone_is_named_on_all_ranks(
    mode: str, at: int, wrapper: str, world: int
) -> None:
    for told in outcomes(mode, at, wrapper, world):
        assert told["event"] == "refused", told
        assert told["ranks"] == [1]
        assert f"ended step {at} without optimizer.step() (<string>:" in str(told["text"])


@pytest.mark.parametrize(
    ("mode", "wrapper", "at"),
    [
        ("skip", "ddp", 1),
        ("skip", "ddp", TOTAL),
        ("skip", "full_shard", 4),
        ("skip-all", "ddp", 4),
        ("all", "ddp", 1),
        ("all", "ddp", TOTAL),
        ("all", "full_shard", 4),
    ],
)
def test_a_skipped_step_is_skipped_and_counted_on_all_ranks(mode: str, wrapper: str, at: int) -> None:
    told = outcomes(mode, at, wrapper)
    assert [each["event"] for each in told] == ["done"] * 2, told
    for each in told:
        assert [at, False, True] in each["told"], told  # type: ignore[operator]
        assert [number for number, applied, _ in each["told"] if applied] == [  # type: ignore[attr-defined]
            number for number in range(1, TOTAL + 1) if number != at
        ]
        assert (each["step"], each["skipped"]) == (TOTAL, 1)
        assert (each["samples"], each["left_out"]) == ((TOTAL - 1) * BATCH / 2, BATCH / 2)
    assert told[0]["weight"] == told[1]["weight"]


def test_a_skip_after_an_update_raises_step_order_error_on_all_ranks(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "updated")
    for told in outcomes("late", 4, pipe=str(tmp_path / "updated")):
        assert told["event"] == "refused", told
        assert told["ranks"] == [1]
        assert "called step.skip() in step 4 (<string>:" in str(told["text"])
        assert "but others had made their update" in str(told["text"])
        assert told["held"] == 4, "the update is not undone"


def test_an_undisturbed_step_sends_only_its_bucket() -> None:
    code = (
        CODE.partition("    told = []")[0]
        + """
    before = {}
    for step in session.steps(state, total=6):
        before[step.number] = session.group._core.progress().operation
        with step:
            train(step, wrapped, optimizer)
    emit("counted", each=[before[number + 1] - before[number] for number in range(3, 6)])
"""
    )
    environment = {"MIN_WORKERS": "2", "WRAPPER": "ddp", "MODE": "none", "AT": "0"}
    with coordinator() as address, workers(2, code, COORDINATOR=address, **environment) as started:
        for worker in started:
            assert worker.expect("counted", 60.0)["each"] == [1, 1, 1]
