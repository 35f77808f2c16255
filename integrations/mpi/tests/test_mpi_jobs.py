"""Ranks of a real mpirun train with the engine "mpi": alone, with deaths in the middle of a sum, and with ULFM."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

from paceline.engines._engine_check import ENGINE_RULES
from paceline.testing import coordinator
from support.mpi import PRELUDE, MpiRun, mpirun

pytestmark = [pytest.mark.needs(what="peers"), pytest.mark.slow]

PROMPT = 0.1
"""Seconds from the verdict to the error (I7)."""

ULFM = pytest.mark.parametrize("with_ulfm", [False, True], ids=["plain", "ulfm"])

TRAIN = """
import hashlib
from paceline import nn
from paceline._group import wrapper_calls as groups
from paceline._links.fault import Fault

WIDTH, WORLD = int(os.environ["WIDTH"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
TOTAL, PACE = int(os.environ.get("TOTAL", "6")), float(os.environ.get("PACE", "0"))
HOW = int(os.environ.get("HOW", "0"))
doomed = []
make, settle = groups.make_engine, Fault.settle
verdicts = {}

def making(name):
    engine = make(name)
    start = engine.all_reduce
    def starting(x):
        ticket = start(x)
        emit("sum", bytes=x.nbytes)
        if doomed:
            time.sleep(0.005)  # bytes move
            emit("struck", unfinished=not ticket.done())
            os.kill(os.getpid(), HOW)
        return ticket
    engine.all_reduce = starting
    return engine

def settling(fault, verdict):
    verdicts.setdefault(fault.generation, time.monotonic())
    settle(fault, verdict)

groups.make_engine, Fault.settle = making, settling

emit("began")
with paceline.join() as session:
    layer = nn.Linear(WIDTH, WIDTH, rng=np.random.default_rng(0))
    model = paceline.DDP(layer, session.group, bucket_mb=100)
    optimizer = paceline.optim.SGD(model, lr=0.01)
    sampler = paceline.ElasticSampler(64, global_batch=8)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in session.steps(state, total=TOTAL):
        with step:
            if HOW and (step.number, step.rank, step.world) == (3, 1, WORLD):
                doomed.append(True)
            time.sleep(PACE)
            x = np.outer(step.indices + 1, np.ones(WIDTH)).astype(np.float32) / 64
            optimizer.zero_grad()
            try:
                model.backward(model(x) / (64 * WIDTH))
                optimizer.step()
            except paceline.PacelineError as error:
                after = time.monotonic() - verdicts.get(step.generation, float("inf"))
                facts = {"type": type(error).__name__, "ranks": list(error.ranks), "text": str(error)}
                emit("raised", after=after, **facts)
                raise
        emit("applied" if step.applied else "undone", step=step.number, world=step.world)
    weight = layer.weight.data
    emit("done", digest=hashlib.sha256(np.ascontiguousarray(weight)).hexdigest(), world=session.size)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PRELUDE + TRAIN)
    return path


def run_rank(*arguments: object) -> list[str]:
    return ["-m", "paceline", "run-rank", *(str(argument) for argument in arguments)]


@ULFM
def test_mpi_engine_keeps_the_engine_rules(with_ulfm: bool, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a short path, for sockets
        with mpirun(3, [str(Path(__file__).with_name("mpi_rules.py")), folder], tmp_path, with_ulfm=with_ulfm) as run:
            run.wait(120)
        results = [json.loads(line) for line in (Path(folder) / "results").read_text().splitlines()]
    assert [name for name, _ in results] == [rule.__name__ for rule in ENGINE_RULES], run.stderr
    assert not [(name, why) for name, why in results if why]


@pytest.mark.parametrize("given", [False, True], ids=["rank 0", "given"])
def test_training_over_mpi_gives_the_same_bits_as_over_links(given: bool, script: Path, tmp_path: Path) -> None:
    digests = set()
    for engine in ("links", "mpi"):
        with coordinator() as address:
            settings = {"coordinator": address} if given else {}
            with mpirun(2, run_rank(script), tmp_path, WIDTH="300", engine=engine, **settings) as run:
                assert run.wait() == 0, run.stderr
        ends = [run.of(rank, "done")[0] for rank in range(2)]
        assert [end["world"] for end in ends] == [2, 2]
        assert len(run.of(0, "sum")) == (6 if engine == "mpi" else 0)
        digests |= {end["digest"] for end in ends}
    assert len(digests) == 1


def lost(run: MpiRun, world: int) -> tuple[list[int], str]:
    """The ranks of mpirun that were not struck, and the text of their error, which was prompt and the same for all."""
    struck = [rank for rank in range(world) if run.of(rank, "struck")]
    assert len(struck) == 1
    assert run.of(struck[0], "struck")[0]["unfinished"], "the sum was over before the fault"
    survivors = [rank for rank in range(world) if rank not in struck]
    raised = [run.of(rank, "raised")[0] for rank in survivors]
    assert {(event["type"], tuple(event["ranks"]), event["text"]) for event in raised} == {
        ("PeerLost", (1,), raised[0]["text"])
    }
    late = [event["after"] for event in raised if event["after"] > PROMPT]
    assert not late, f"errors came {late} s after the verdict"
    assert {event["bytes"] for rank in range(world) for event in run.of(rank, "sum")} == {4096 * 4097 * 4}
    return survivors, raised[0]["text"]


def steps(run: MpiRun, rank: int) -> list[tuple[str, int, int]]:
    return [(each["event"], each["step"], each["world"]) for each in run.events(rank) if "step" in each]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("world", "how", "given"),
    [
        pytest.param(2, signal.SIGKILL, True, marks=pytest.mark.exhaustive),
        (3, signal.SIGKILL, False),
        (2, signal.SIGSTOP, False),
        pytest.param(3, signal.SIGSTOP, True, marks=pytest.mark.exhaustive),
    ],
)
def test_survivors_raise_peer_lost_if_a_rank_is_lost_in_a_64_mib_sum(
    world: int, how: signal.Signals, given: bool, script: Path, tmp_path: Path
) -> None:
    settings = {"WIDTH": "4096", "HOW": str(int(how)), "failure_timeout": "2"}
    with coordinator() as address:
        settings |= {"coordinator": address} if given else {}
        with mpirun(world, run_rank(script), tmp_path, **settings) as run:
            assert run.wait() != 0, run.stderr
    survivors, text = lost(run, world)
    assert survivors == [rank for rank in range(world) if rank != 1], "ranks are not mpirun's"
    # mpirun wakes a frozen rank before it ends it, so that one may be told too.
    assert run.stderr.count(f"paceline: {text}") >= world - 1, run.stderr
    for rank in survivors:
        assert steps(run, rank) == [("applied", 1, world), ("applied", 2, world), ("undone", 3, world)]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("world", "how"),
    [
        (3, signal.SIGKILL),
        pytest.param(3, signal.SIGSTOP, marks=pytest.mark.exhaustive),
        pytest.param(2, signal.SIGKILL, marks=pytest.mark.exhaustive),
    ],
)
def test_survivors_continue_training_with_ulfm(world: int, how: signal.Signals, script: Path, tmp_path: Path) -> None:
    settings = {"WIDTH": "4096", "HOW": str(int(how)), "failure_timeout": "2"}
    with (
        coordinator(settle_time=20.0) as address,  # all begin together
        mpirun(world, run_rank("--min", 1, script), tmp_path, with_ulfm=True, coordinator=address, **settings) as run,
    ):
        run.expect_of("done", world - 1, 60.0)
    survivors, _ = lost(run, world)
    for rank in survivors:
        assert steps(run, rank) == [
            *(("applied", step, world) for step in (1, 2)),
            ("undone", 3, world),
            *(("applied", step, world - 1) for step in (3, 4, 5, 6)),
        ]
    assert len({run.of(rank, "done")[0]["digest"] for rank in survivors}) == 1


@pytest.mark.exhaustive
def test_a_frozen_rank_rejoins_with_ulfm(script: Path, tmp_path: Path) -> None:
    settings = {"WIDTH": "300", "TOTAL": "150", "PACE": "0.1", "failure_timeout": "2"}
    with (
        coordinator(settle_time=20.0) as address,
        mpirun(3, run_rank("--min", 1, script), tmp_path, with_ulfm=True, coordinator=address, **settings) as run,
    ):
        run.expect_of("applied", 3, 60.0)
        pid = run.of(1, "began")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        run.expect_of("undone", 2, 30.0)
        os.kill(pid, signal.SIGCONT)
        assert run.wait(90) == 0, run.stderr
    ends = [run.of(rank, "done")[0] for rank in range(3)]
    assert [end["world"] for end in ends] == [3, 3, 3]
    assert len({end["digest"] for end in ends}) == 1
    assert {world for _, _, world in steps(run, 0)} == {2, 3}


def test_an_error_of_the_script_is_shown_and_others_name_its_rank(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        PRELUDE
        + "with paceline.join() as session:\n"
        + "    if session.rank == 1: raise ValueError('no such file')\n"
        + "    try: session.group.barrier()\n"
        + "    except paceline.PeerRaised as error: emit('told', ranks=list(error.ranks)); raise\n"
    )
    with mpirun(2, run_rank(path), tmp_path) as run:
        assert run.wait() == 1, run.stderr
    assert [event["ranks"] for event in run.of(0, "told")] == [[1]]
    (traceback,) = (part for part in run.stderr.split("Traceback")[1:] if "ValueError: no such file" in part)
    assert "paceline_mpi" not in traceback
    assert "paceline/cli" not in traceback
    assert 'train.py", line' in traceback


def test_a_rank_that_fails_before_it_joins_ends_the_job(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, sys, paceline\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': sys.exit(5)\npaceline.join().leave()\n"
    )
    with mpirun(2, run_rank(path), tmp_path) as run:
        assert run.wait() == 5, run.stderr


def test_paceline_run_becomes_mpirun(script: Path, tmp_path: Path) -> None:
    arguments = ["-m", "paceline", "run", "--engine", "mpi", "-n", "2", "--job", "digits", str(script)]
    with mpirun(2, arguments, tmp_path, whole=True, WIDTH="30") as run:
        assert run.wait() == 0, run.stderr
    assert [len(run.of(rank, "done")) for rank in range(2)] == [1, 1]


def test_fewer_ranks_are_refused_without_ulfm(script: Path, tmp_path: Path) -> None:
    with mpirun(2, run_rank("--min", 1, script), tmp_path, WIDTH="30") as run:
        assert run.wait() == 2
    assert "without ULFM nobody can go on when a rank dies" in " ".join(run.stderr.split())
