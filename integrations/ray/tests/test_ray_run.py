"""`paceline_ray.run` on a real Ray cluster of three raylets: actors and nodes die, and training goes on."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import ray

import paceline_ray
from paceline.config import Config
from paceline.launch._own_coordinator import own_addresses
from support.blocks import ROOT, blocks
from support.ray_cluster import RayNodes
from support.ray_training import CannotGoOn, RayRecords, fail, train

pytestmark = [pytest.mark.needs(what="ray"), pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def three_nodes(nodes: RayNodes) -> None:
    """Each test begins with three nodes. Ray's threads are there before it, and no leak of it."""
    while len(nodes.others) < 2:
        nodes.add()


@contextmanager
def meanwhile(story: Callable[[], None]) -> Iterator[None]:
    """Runs the story in a thread of its own, while this one is inside `run`; it raises what the story raised."""
    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(story)
        try:
            yield
        finally:
            told.result()


def node_of(pid: int) -> str:
    """The node of a worker, which is the parent of its process."""
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    command = Path(f"/proc/{parent}/cmdline").read_text().split("\0")
    return next(word.partition("=")[2] for word in command if word.startswith("--node_id="))


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_training_continues_as_workers_and_nodes_die_and_join(
    nodes: RayNodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """I1, I5, I6: ray.kill, SIGKILL and the loss of a node; there is room for three of four workers."""
    folder = tmp_path / "told"
    folder.mkdir()
    told, times, total = RayRecords(folder, 1000), list[float](), 1000
    caplog.set_level(logging.INFO, "paceline_ray")

    def story() -> None:
        told.wait_until(lambda: len(told.in_view(3)) == 3, "three train")
        told.wait_until(lambda: told.step() > 20 and len(told.in_view(3)) == 3, "Ray has killed one, replaced now")
        for _ in range(5):
            times.append(recovery_after(told, told.in_view(3)[1]))
            told.wait_until(lambda: len(told.in_view(3)) == 3, "it was replaced")
        head = ray.get_runtime_context().get_node_id()
        victim = next(pid for pid in told.in_view(3) if node_of(pid) != head)
        nodes.remove(node_of(victim))
        told.wait_until(lambda: gone(victim), "Ray ends what runs on a lost node")
        told.wait_until(lambda: len(told.in_view(2)) == 2, "two train")
        step = told.step()
        told.wait_until(lambda: told.step() > step + 5, "two go on while a third one has no room")
        nodes.add()
        told.wait_until(lambda: len(told.in_view(3)) == 3, "a new node has room for the third one")

    with ThreadPoolExecutor(1) as pool:  # the story is told here, because Ray starts nodes on the main thread alone
        ran = pool.submit(partial(paceline_ray.run, train, str(folder), total, 0.02, 5, min_workers=2, max_workers=4))
        try:
            story()
        finally:
            Path(f"{folder}.over").touch()
        results = ran.result()
    assert len(results) == 3
    assert list(results) == [rank for rank, _ in results.values()] == [0, 1, 2]
    told.check(count=3)
    said = [record.getMessage() for record in caplog.records if record.name == "paceline_ray"]
    assert any(text.startswith("restarting rank 1 on ") and "died) as a new worker in 0.1 s" in text for text in said)
    assert len([text for text in said if text.startswith("restarting rank ")]) >= 7, said
    logging.getLogger("paceline_ray").info("ms from SIGKILL to a commit: %s", [round(1000 * each) for each in times])
    # On a machine where nothing else runs 0.3 s are asked; on any, the end of a process is noticed before its silence.
    assert median(times) < (0.3 if os.environ.get("QUIET") == "1" else Config().failure_timeout), times


def recovery_after(told: RayRecords, pid: int) -> float:
    """Kills a process; returns the seconds until another one commits a step that it had not committed then."""
    step, at = told.step(), time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def commits() -> list[float]:
        return [
            event["at"]
            for each in told.trainers
            if each.pid != pid
            for event in each.of("committed")
            if event["at"] > at and event["step"] > step + 1
        ]

    told.wait_until(lambda: bool(commits()), "the others go on")
    return min(commits()) - at


def test_an_error_of_the_function_is_raised_with_its_rank(nodes: RayNodes) -> None:
    with pytest.raises(CannotGoOn, match="the user's code failed") as caught:
        paceline_ray.run(fail, min_workers=2, restarts=0, config=Config(failure_timeout=1.0))
    assert isinstance(caught.value, ray.exceptions.RayTaskError)
    assert "in fail" in str(caught.value), "the worker's traceback"
    (note,) = caught.value.__notes__
    assert note.startswith("rank 1 on ")
    assert note.endswith("raised CannotGoOn: the user's code failed")


def test_a_function_that_always_fails_is_given_up_after_its_restarts(
    nodes: RayNodes, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(session: object, name: str) -> None:
        raise SystemExit(f"no {name}")

    with pytest.raises(RuntimeError, match=r"called sys\.exit"):
        paceline_ray.run(broken, "data", min_workers=1, restarts=2)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"][1:]
    assert len(said) == 3, said
    assert "(1 of its 2 restarts)" in said[0]
    assert said[2].endswith("called sys.exit('no data'); its 2 restarts are used up")


def test_ctrl_c_lets_workers_leave(nodes: RayNodes, tmp_path: Path) -> None:
    told, said = RayRecords(tmp_path, 100_000), list[Any]()

    def story() -> None:
        try:
            told.wait_until(lambda: len(told.in_view(3)) == 3, "three train")
            # Others of this user's commands may serve a job of this name, on loopback.
            (where,) = [each for each in own_addresses() if each.startswith(f"{ray.util.get_node_ip_address()}:")]
            status = [sys.executable, "-m", "paceline", "status", "default", "--coordinator", where]
            said.append(subprocess.run(status, capture_output=True, text=True, timeout=30))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    with meanwhile(story), pytest.raises(KeyboardInterrupt):
        paceline_ray.run(train, str(tmp_path), told.total, 0.01, min_workers=1, max_workers=4)
    assert said[0].returncode == 0, said[0].stderr
    assert "3 workers are training" in said[0].stdout, "other commands on the driver's machine find the run"
    assert len(told.trainers) == 3
    assert all(each.of("dismissed") for each in told.trainers), str(told)
    assert len({each.of("applied")[-1]["step"] for each in told.trainers}) == 1, "all left after the same step"
    told.wait_until(lambda: all(gone(each.pid) for each in told.trainers), "no actor is left")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_token_is_in_no_environment_argument_or_log(
    nodes: RayNodes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("PACELINE_TOKEN", "a-token-of-this-test-alone")

    def look(session: object) -> tuple[bool, bool]:
        environment, command = (Path(f"/proc/self/{name}").read_bytes() for name in ("environ", "cmdline"))
        return b"of-this-test" in environment or "of-this-test" in str(os.environ), b"of-this-test" in command

    assert paceline_ray.run(look, min_workers=2) == {0: (False, False), 1: (False, False)}
    assert "of-this-test" not in caplog.text


def test_invalid_bounds_and_a_ray_client_are_refused(nodes: RayNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="min_workers must be 1 or more and max_workers no less, not 3 and 2"):
        paceline_ray.run(fail, min_workers=3, max_workers=2)
    with pytest.raises(ValueError, match="restarts must be 0 or more"):
        paceline_ray.run(fail, min_workers=1, restarts=-1)
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(RuntimeError, match="is a Ray client"):
        paceline_ray.run(fail, min_workers=1)


def test_the_script_of_the_docs_page_prints_the_shown_output(nodes: RayNodes, tmp_path: Path) -> None:
    page = ROOT / "docs" / "how-to" / "ray.md"
    script, shown = (block.code for block in blocks(page)[:2])
    (tmp_path / "train_ray.py").write_text(script)
    command, expected = shown.splitlines()
    assert command == "$ python train_ray.py"
    done = subprocess.run(
        [sys.executable, "train_ray.py"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": nodes.address},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout.splitlines(), done.stdout + done.stderr
