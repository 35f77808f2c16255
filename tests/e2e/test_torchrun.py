"""`paceline run` with torchrun's flags: what workers are told, and one world after another. Needs no torch."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.command import Command, command, wait_until_gone
from support.ports import free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher ties processes with prctl")

TELL = """
    import json, os
    print(json.dumps({name: value for name, value in os.environ.items()}))
"""

WAIT = """
    import os, signal
    rank, size, restart = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    print("in world", rank, "of", size, "restart", restart, "pid", os.getpid())
    signal.pause()
"""

ONCE = """
    import os, signal, sys
    from pathlib import Path
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "rank", os.environ["RANK"])
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < int(sys.argv[1]):
        fifo = Path(__file__).with_suffix(".there")
        if os.environ["RANK"] == "1":
            fifo.read_text()  # rank 0 has said what it is, and will not be ended before
            sys.exit(4)
        if os.environ["RANK"] == "0":
            fifo.write_text("")
        signal.pause()  # it takes the launcher to end it
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


@pytest.fixture
def coordinator() -> Iterator[str]:
    with command("coordinator", "--listen", "127.0.0.1:0") as running:
        running.wait_for("listens on")
        found = re.search(r"listens on (\S+)", running.stderr)
        assert found is not None
        yield found[1]


def write(script: Path, code: str) -> str:
    script.write_text(textwrap.dedent(code))
    os.mkfifo(script.with_suffix(".there"))
    return str(script)


def told(*runs: Command) -> list[dict[str, str]]:
    """The environments of all workers, by rank."""
    lines = [line for run in runs for line in run.stdout.splitlines()]
    found: list[dict[str, str]] = [json.loads(line.partition("] ")[2]) for line in lines]
    for line, environment in zip(lines, found, strict=True):
        assert line.startswith(f"[{environment['RANK']}] ")
    return sorted(found, key=lambda environment: int(environment["RANK"]))


def test_one_node(script: Path) -> None:
    with command("run", "--standalone", "--nproc_per_node=2", "--rdzv-id", "digits", write(script, TELL)) as run:
        assert run.wait() == 0, str(run)
    assert run.stderr == ""
    workers = told(run)
    assert [worker["RANK"] for worker in workers] == ["0", "1"]
    for worker in workers:
        assert worker["LOCAL_RANK"] == worker["ROLE_RANK"] == worker["PACELINE_RANK"] == worker["RANK"]
        assert worker["WORLD_SIZE"] == worker["LOCAL_WORLD_SIZE"] == worker["ROLE_WORLD_SIZE"] == "2"
        assert (worker["GROUP_RANK"], worker["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert (worker["TORCHELASTIC_RUN_ID"], worker["PACELINE_JOB"]) == ("digits", "digits")
        assert (worker["TORCHELASTIC_RESTART_COUNT"], worker["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
        assert worker["MASTER_ADDR"] == "127.0.0.1"
        assert worker["MASTER_PORT"] == workers[0]["MASTER_PORT"]
        assert worker["OMP_NUM_THREADS"] == "1"
    with socket.socket() as probe:
        probe.bind(("", int(workers[0]["MASTER_PORT"])))  # rank 0 could have had it


@pytest.mark.slow
def test_two_nodes_with_numbers(script: Path) -> None:
    port = free_port(2)
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    path = write(script, TELL)
    with (
        command("run", *where, "--node-rank", "1", "--nproc-per-node", "1", path) as two,
        command("run", *where, "--node-rank", "0", "--nproc-per-node", "2", path) as one,
    ):
        assert (one.wait(), two.wait()) == (0, 0), f"{one}{two}"
    workers = told(one, two)
    assert told(one) == workers[:2]  # the node's number, and not who came first
    assert [(worker["RANK"], worker["LOCAL_RANK"], worker["GROUP_RANK"]) for worker in workers] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
    ]
    for worker in workers:
        assert (worker["WORLD_SIZE"], worker["GROUP_WORLD_SIZE"]) == ("3", "2")
        assert (worker["MASTER_ADDR"], worker["MASTER_PORT"]) == ("127.0.0.1", str(port))
        assert worker["PACELINE_COORDINATOR"] == f"127.0.0.1:{port + 1}"
    said = f"paceline: waiting for the launchers of 2 nodes at 127.0.0.1:{port + 1}\n"
    assert (one.stderr, two.stderr) == (said, said)


@pytest.mark.slow
def test_two_nodes_that_are_numbered_as_they_come(script: Path) -> None:
    where = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port(2)}")
    path = write(script, TELL)
    with command("run", *where, path) as one, command("run", *where, path) as two:
        assert (one.wait(), two.wait()) == (0, 0), f"{one}{two}"
    workers = told(one, two)
    assert [(worker["RANK"], worker["GROUP_RANK"]) for worker in workers] == [("0", "0"), ("1", "1")]
    assert workers[0]["MASTER_PORT"] == workers[1]["MASTER_PORT"]


@pytest.mark.parametrize("role", [(), ("--node-rank", "0"), ("--node-rank", "1")], ids=["any", "first", "other"])
def test_nodes_that_meet_where_others_come_in_need_a_secret(role: tuple[str, ...], script: Path) -> None:
    where = ("--nnodes", "2", "--master-addr", "node1.invalid", "--rdzv-id", "12345")
    with command("run", *where, *role, write(script, TELL)) as run:
        assert run.wait() == 2, str(run)
    (line,) = run.stderr.splitlines()
    meet = "paceline: launchers meet at node1.invalid:29501, and everyone who can reach that port could join"
    assert line.startswith(meet)
    for advice in ("PACELINE_TOKEN", "--rdzv-id", "--insecure"):
        assert advice in line


@pytest.mark.slow
@pytest.mark.parametrize("secret", ["--rdzv-id", "PACELINE_TOKEN"])
def test_nodes_with_a_secret_let_no_stranger_in(secret: str, script: Path) -> None:
    place, value = f"0.0.0.0:{free_port(2)}", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"
    where = ("--nnodes=2", f"--rdzv-endpoint={place}", *([f"--rdzv-id={value}"] if secret == "--rdzv-id" else []))
    environment = {} if secret == "--rdzv-id" else {secret: value}
    path = write(script, WAIT)
    with command("run", *where, path, **environment) as one, command("run", *where, path, **environment) as two:
        for run in (one, two):
            run.wait_for("of 2 restart 0")
            assert ("the token is made from --rdzv-id" in run.stderr) == (secret == "--rdzv-id")
        with command("status", "--coordinator", place) as stranger:
            assert stranger.wait() == 1
        assert "it wants a token" in stranger.stderr
        for run in (one, two):
            run.signal(signal.SIGINT)
        assert {one.wait(), two.wait()} <= {1, 130}, f"{one}{two}"  # one may hear of the other's end first


@pytest.mark.slow
@pytest.mark.parametrize(
    "numbered",
    [pytest.param(False, id="as they come"), pytest.param(True, id="numbered", marks=pytest.mark.exhaustive)],
)
def test_nodes_that_meet_on_one_machine_make_a_token(numbered: bool, script: Path, tmp_path: Path) -> None:
    """All users of the machine reach it. `paceline status` of this user finds the token, as the other launcher does."""
    port, path, own = free_port(2), write(script, WAIT), {"TMPDIR": str(tmp_path)}
    where = [["--nnodes=2", f"--rdzv-endpoint=localhost:{port + 1}"]] * 2
    if numbered:  # node 1, which begins, waits for node 0
        where = [["--nnodes=2", f"--node-rank={node}", f"--master-port={port}"] for node in (1, 0)]
    with command("run", *where[0], path, **own) as one, command("run", *where[1], path, **own) as two:
        for run in (one, two):
            run.wait_for("of 2 restart 0")
            run.wait_for(f"waiting for the launchers of 2 nodes at 127.0.0.1:{port + 1}")
        with command("status", "--json", **own) as status:
            assert status.wait() == 0, str(status)
        assert {job["name"]: job["phase"] for job in json.loads(status.stdout)["jobs"]}["default/nodes"] == "running"
        with command("status", "--coordinator", f"127.0.0.1:{port + 1}") as stranger:
            assert stranger.wait() == 1
        assert "it wants a token" in stranger.stderr
        for run in (one, two):
            run.signal(signal.SIGINT)
        assert {one.wait(), two.wait()} <= {1, 130}, f"{one}{two}"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_nodes_on_one_machine_do_not_join_a_stranger_who_was_first(nodes: str, script: Path, coordinator: str) -> None:
    """It may be another user's, and would get gradients and state."""
    with command("run", "--nnodes", nodes, "--rdzv-endpoint", coordinator, write(script, TELL)) as run:
        assert run.wait() == 1, str(run)
    assert run.stdout == ""
    assert f"{coordinator} is in use, but not by a paceline run of yours" in run.stderr


def test_one_node_joins_a_run_of_its_user_where_it_would_meet_others(script: Path, tmp_path: Path) -> None:
    port, path, own = free_port(2), write(script, TELL), {"TMPDIR": str(tmp_path)}
    waiting = tmp_path / "waiting.py"
    write(waiting, WAIT)
    with command("run", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "one", str(waiting), **own) as first:
        first.wait_for("in world 0 of 1")
        with command("run", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "two", path, **own) as second:
            assert second.wait() == 0, str(second)
        (worker,) = told(second)
        assert (worker["PACELINE_COORDINATOR"], len(worker["PACELINE_TOKEN"])) == (f"127.0.0.1:{port}", 64)


def test_insecure_nodes_are_warned_of_the_address(script: Path) -> None:
    port = free_port(2)
    where = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "node1.invalid", "--master-port", str(port))
    with command("run", "--insecure", *where, write(script, TELL)) as run:
        everywhere = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
        run.wait_for(f"everyone who can reach {everywhere}:{port + 1} can join")


def test_one_node_needs_no_secret_wherever_it_could_meet_others(script: Path) -> None:
    port = free_port(2)
    with command("run", "--rdzv-endpoint", f"0.0.0.0:{port}", write(script, TELL)) as run:
        assert run.wait() == 0, str(run)
    (worker,) = told(run)
    assert worker["PACELINE_COORDINATOR"] == f"127.0.0.1:{port}"


@pytest.mark.slow
def test_paceline_s_ranks_are_torchrun_s(script: Path, coordinator: str) -> None:
    code = """
        import os
        import numpy as np
        import paceline
        with paceline.join() as session:
            assert session.rank == int(os.environ["RANK"])
            print("sum", int(session.group.all_reduce(np.array([session.rank + 1]))[0]))
    """
    where = ("--nnodes", "2", "--nproc-per-node", "2", "--coordinator", coordinator)
    path = write(script, code)
    with command("run", *where, path) as one, command("run", *where, path) as two:
        assert (one.wait(), two.wait()) == (0, 0), f"{one}{two}"
    assert sorted((one.stdout + two.stdout).splitlines()) == [f"[{rank}] sum 10" for rank in range(4)]


@pytest.mark.slow
def test_a_failure_ends_the_world_and_another_one_follows(script: Path) -> None:
    path = write(script, ONCE)
    # The grace is failure_timeout + 5 s: as short as it can be here.
    with command(
        "run", "--nproc-per-node", "2", "--max-restarts", "1", path, "1", PACELINE_FAILURE_TIMEOUT="0.01"
    ) as run:
        assert run.wait() == 0, str(run)
    assert sorted(run.stdout.splitlines()) == [f"[{r}] attempt {a} rank {r}" for r in range(2) for a in range(2)]
    assert re.search(r"starting all workers again, 1 of 1: rank 1 \(pid \d+\) ended with exit code 4", run.stderr)


@pytest.mark.slow
def test_when_no_restart_is_left_the_exit_code_is_the_worker_s(script: Path) -> None:
    code = "import os, sys\nsys.exit(4 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))"
    with command("run", "--nproc-per-node", "1", "--max-restarts", "2", write(script, code)) as run:
        assert run.wait() == 6, str(run)
    assert run.stderr.count("starting all workers again") == 2


@pytest.mark.slow
def test_a_failure_at_one_node_ends_the_world_at_all(script: Path, coordinator: str) -> None:
    path = write(script, ONCE)
    where = ("--nnodes", "2", "--max-restarts", "1", "--coordinator", coordinator)
    with (
        command("run", *where, "--node-rank", "0", path, "1") as one,
        command("run", *where, "--node-rank", "1", path, "1") as two,
    ):
        assert (one.wait(), two.wait()) == (0, 0), f"{one}{two}"
    assert one.stdout.splitlines() == ["[0] attempt 0 rank 0", "[0] attempt 1 rank 0"]
    assert two.stdout.splitlines() == ["[1] attempt 0 rank 1", "[1] attempt 1 rank 1"]
    why = r"rank 1 \(pid \d+\) ended with exit code 4, at node 1 \(\S+\)"
    assert re.search(rf"paceline: stopping 1 worker: {why}", one.stderr), str(one)
    for run in (one, two):
        assert re.search(rf"paceline: starting all workers again, 1 of 1: {why}", run.stderr), str(run)


@pytest.mark.slow
def test_a_failure_elsewhere_is_an_exit_code_too(script: Path, coordinator: str) -> None:
    path = write(script, ONCE)
    where = ("--nnodes", "2", "--coordinator", coordinator)
    with (
        command("run", *where, "--node-rank", "0", path, "1") as one,
        command("run", *where, "--node-rank", "1", path, "1") as two,
    ):
        assert (one.wait(), two.wait()) == (1, 4), f"{one}{two}"
    assert "ended with exit code 4, at node 1" in one.stderr.splitlines()[-1]


@pytest.mark.slow
def test_nodes_come_and_go(script: Path, coordinator: str) -> None:
    where = ("--nnodes", "1:3", "--max-restarts", "2", "--coordinator", coordinator, write(script, WAIT))
    with command("run", *where) as one:
        one.wait_for("in world 0 of 1 restart 0")
        with command("run", *where) as two, command("run", *where) as three:
            for run in (one, two, three):
                run.wait_for("of 3 restart 0")  # newcomers are no failures
            assert "paceline: stopping 1 worker: another node has come" in one.stderr.splitlines()
            two.signal(signal.SIGTERM)
            assert two.wait() == 143, str(two)
            for run in (one, three):
                run.wait_for("of 2 restart 1")
                assert re.search(r"stopping 1 worker: node \d \(\S+\) was ended by SIGTERM", run.stderr), str(run)
            three.signal(signal.SIGKILL)
            three.wait()
            one.wait_for("in world 0 of 1 restart 2")
            assert re.search(r"stopping 1 worker: among the launchers, rank \d \(.*\) died", one.stderr), str(one)
        one.signal(signal.SIGINT)
        assert one.wait() == 130, str(one)
    found = [int(pid) for run in (one, two, three) for pid in re.findall(r"pid (\d+)$", run.stdout, re.MULTILINE)]
    assert len(found) >= 7
    wait_until_gone(found)


@pytest.mark.slow
def test_a_program_that_is_not_python(script: Path) -> None:
    write(script, '#!/bin/sh\necho "rank $RANK of $WORLD_SIZE: $1"\nexit 3\n')
    script.chmod(0o755)
    with command("run", "--nproc-per-node", "1", "--no-python", str(script), "one two") as run:
        assert run.wait() == 3, str(run)
    assert run.stdout == "[0] rank 0 of 1: one two\n"


@pytest.mark.slow
def test_lines_that_are_redirected_are_in_files_only(script: Path, tmp_path: Path) -> None:
    path = write(script, "import sys; print('out'); print('err', file=sys.stderr)")
    logs = ("--log_dir", str(tmp_path / "logs"))
    with command("run", "--nproc-per-node", "2", *logs, "-r", "3", "-t", "1:1", path) as run:
        assert run.wait() == 0, str(run)
    assert (run.stdout, run.stderr) == ("[1] out\n", "")
    for index in range(2):
        assert {"out", "err"} <= set((tmp_path / "logs" / f"worker-{index}.log").read_text().splitlines())
    with command("run", "-n", "1", "--tee", "3", path, TMPDIR=str(tmp_path)) as run:
        assert run.wait() == 0, str(run)
    found = re.match(r"paceline: the lines of the workers are kept in (\S+)", run.stderr)
    assert found is not None
    assert "out" in (Path(found[1]) / "worker-0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-n", "2", "--nnodes", "1"), "-n does not go with torchrun's --nnodes: write --nproc-per-node"),
        (("--restarts", "1", "--standalone"), "--restarts does not go with torchrun's --standalone"),
        (("--nnodes", "x"), "--nnodes must be a number from 1, or MIN:MAX, not 'x'"),
        (("--rdzv-backend", "etcd"), "--rdzv-backend etcd: launchers always meet at a Paceline coordinator"),
        (("-r", "4"), "-r/--redirects must be 0 (none), 1 (stdout)"),
        (("--no-python", "-m"), "give --no-python or --module, not both"),
        (("--rdzv-endpoint", "a:1", "--coordinator", "b:1"), "both name the coordinator"),
    ],
)
@pytest.mark.sampled(2)
def test_what_cannot_be_is_one_line(script: Path, arguments: tuple[str, ...], words: str) -> None:
    with command("run", *arguments, write(script, "")) as run:
        assert run.wait() == 2
    (line,) = run.stderr.splitlines()
    assert words in line


def test_a_port_that_rank_0_cannot_have_is_said_at_once(script: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with command("run", "--nproc-per-node", "1", "--master-port", str(port), write(script, "")) as run:
            assert run.wait() == 1
    assert f"rank 0 cannot listen at port {port} (--master-port): Address already in use" in run.stderr


def test_help_has_torchrun_s_flags_in_a_panel_of_their_own() -> None:
    with command("run", "--help", COLUMNS="120", TERM="dumb") as run:
        assert run.wait() == 0
    own, _, torchrun = run.stdout.partition("torchrun's flags:")
    for flag in ("--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--rdzv-endpoint", "--max-restarts"):
        assert flag in torchrun
        assert flag not in own
    assert "_per_node" not in run.stdout
