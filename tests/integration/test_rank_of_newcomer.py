"""What a script asks before its steps: the first workers have a rank then, and one that comes later has none."""

from __future__ import annotations

from paceline.testing import coordinator
from support.processes import workers

CODE = """
import logging

class Tells(logging.Handler):
    def emit(self, record):
        if "before session.steps()" in record.getMessage():
            emit("warned", text=record.getMessage())

logging.getLogger("paceline.session").addHandler(Tells())
with paceline.join() as session:
    for name in ("rank", "size"):
        try:
            emit("has", number=getattr(session, name))
        except paceline.StepOrderError as error:
            emit("has", number=None, text=str(error), members=len(session.members), generation=session.generation)
    told = 0
    for step in session.steps(paceline.TrainState(notes={"any": 0}), total=1_000_000):
        with step:
            session.group.all_reduce(np.ones(1))
        if step.applied and session.size != told:
            told = session.size
            emit("trains", rank=session.rank, size=session.size)
"""


def test_reading_rank_before_steps_warns_and_fails_for_a_newcomer() -> None:
    environment = {"MIN_WORKERS": "1", "MAX_WORKERS": "2"}
    with coordinator() as address, workers(1, CODE, COORDINATOR=address, **environment) as (first,):
        assert [first.expect("has")["number"] for _ in range(2)] == [0, 1]
        assert first.expect("warned")["text"].startswith("session.rank was read before session.steps()")
        assert first.expect("trains")["size"] == 1
        with workers(1, CODE, COORDINATOR=address, **environment) as (late,):
            for name in ("rank", "size"):
                told = late.expect("has")
                assert told["text"].startswith(f"session.{name} is not known: job 'default' is training, with 1 rank,")
                assert "this worker enters at its first step" in told["text"]
                assert "paceline.once_per_host" in told["text"]
                assert (told["members"], told["generation"]) == (0, 0)
            late.expect("warned")
            assert (late.expect("trains")["rank"], first.expect("trains")["size"]) == (1, 2)


OVER = """
with paceline.join() as session:
    try:
        number = getattr(session, os.environ["PACELINE_ASKED"])
    except paceline.Dismissed as end:
        emit("dismissed", reason=end.reason)
        raise
    for step in session.steps(paceline.TrainState(notes={"any": 0}), total=2):
        with step:
            pass
    emit("done")
"""


def test_a_worker_that_reads_its_rank_after_the_last_step_exits_with_0() -> None:
    environment = {"MIN_WORKERS": "1", "MAX_WORKERS": "2"}
    with coordinator() as address:
        with workers(1, OVER, COORDINATOR=address, ASKED="rank", **environment) as (first,):
            first.expect("done")
            assert first.wait() == 0
        for asked in ("rank", "size"):
            with workers(1, OVER, COORDINATOR=address, ASKED=asked, **environment) as (late,):
                assert "is done (step 2)" in late.expect("dismissed")["reason"]
                assert late.wait() == 0, late.stderr
