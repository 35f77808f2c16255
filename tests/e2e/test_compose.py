"""The image and the compose files: containers that train while they are killed, frozen, cut off, added and removed.

The faults are those of deploy/chaos.py, run as a user would; what it tells is held against the figures here, and what
the workers wrote down against the sampler itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from e2e.docker import BUILD, build, build_etcd, compose_command, engine

import paceline

pytestmark = [pytest.mark.needs(what="containers"), pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
BASE, LIBRARY, IMAGE, ETCD = "python:3.11-slim", "paceline-test-library", "paceline-test", "paceline-test-etcd"
PROJECT = "paceline-test"
CAN_SERVE_HTTP = "import paceline; from paceline_server.settings import check_http; check_http()"
TOKENS = {"PACELINE_TOKEN": "a-token-of-this-test-alone", "WORKER_TOKEN": "a-token-of-its-workers"}
SETTINGS = {**BUILD, **TOKENS, "PACELINE_IMAGE": IMAGE}
WORKERS = 4

MOST_MB = 200
"""What the library may add to its base."""
SILENCE_S = 3.0
"""The job's failure_timeout."""
LATE_S = 10.0
"""However busy the machine is, nothing comes later than this; `deploy/chaos.py` prints how long each fault takes."""


def run(*words: str, timeout: float = 900.0, **environment: str) -> str:
    """Runs a command; returns its output, and shows it if it fails."""
    settings = os.environ | SETTINGS | environment
    done = subprocess.run(words, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-8000:]}{done.stderr[-8000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    with engine():
        build(LIBRARY, target="library")
        build(IMAGE)
        yield IMAGE


def test_the_library_adds_little_to_its_base_image(image: str) -> None:
    sizes = [int(run("docker", "image", "inspect", "-f", "{{.Size}}", name)) / 1e6 for name in (BASE, LIBRARY, image)]
    print(f"library {sizes[1] - sizes[0]:.0f} MB, what the examples need {sizes[2] - sizes[1]:.0f} MB")
    assert sizes[1] - sizes[0] <= MOST_MB
    layers = [
        json.loads(run("docker", "image", "inspect", "-f", "{{json .RootFS.Layers}}", n)) for n in (LIBRARY, image)
    ]
    assert layers[1][: len(layers[0])] == layers[0]  # the extras come on top, and nothing of the library twice
    run("docker", "run", "--rm", "--entrypoint", "python3", LIBRARY, "-c", CAN_SERVE_HTTP)


def test_the_image_runs_paceline_as_an_unprivileged_user(image: str) -> None:
    assert re.match(r"\d+\.\d+", run("docker", "run", "--rm", image, "--version"))
    assert run("docker", "run", "--rm", "--entrypoint", "id", image, "-u").strip() == "10001"
    assert run("docker", "image", "inspect", "-f", "{{.Config.User}}", image).strip() == "10001"
    own = run(
        "docker", "run", "--rm", "--entrypoint", "find", image, "/opt/paceline", "-writable", "-not", "-type", "l"
    )
    assert own == ""


def test_the_sbom_lists_all_locked_packages(image: str) -> None:
    words = ("docker", "run", "--rm", "-i", "--network", "none", "--entrypoint", "python3", image, "-")
    with (ROOT / "deploy" / "sbom.py").open() as script:
        done = subprocess.run(words, stdin=script, capture_output=True, text=True, timeout=60.0, check=True)
    listed = json.loads(done.stdout)
    assert listed["metadata"]["component"]["purl"] == f"pkg:pypi/paceline@{paceline.__version__}"
    there = {entry["purl"] for entry in listed["components"]}
    for name in ("requirements.lock", "requirements-demo.lock"):
        lines = (ROOT / "deploy" / name).read_text().splitlines()[1:]
        locked = {"pkg:pypi/" + line.split()[0].replace("==", "@") for line in lines}
        assert locked <= there
    assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in there)


def test_the_image_refuses_to_listen_publicly_without_a_token(image: str) -> None:
    done = subprocess.run(["docker", "run", "--rm", image], capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: everyone who can reach 0.0.0.0:7400 could join"), done.stderr


@pytest.mark.parametrize(
    ("command", "health"),
    [
        pytest.param(["coordinator", "--listen", "0.0.0.0:7400"], "healthy", id="a coordinator that answers"),
        pytest.param(["coordinator", "--listen", "0.0.0.0:7411"], "unhealthy", id="one that does not"),
        pytest.param(["run", "digits_elastic.py", "--epochs", "9999"], "healthy", id="a worker, which does not listen"),
    ],
)
def test_the_health_check_is_right_for_coordinators_and_workers(image: str, command: list[str], health: str) -> None:
    often = ("--health-interval=0.5s", "--health-retries=2", "--health-start-period=1ms")
    container = run("docker", "run", "-d", "-e", "PACELINE_TOKEN", *often, image, *command).strip()
    try:
        deadline = time.monotonic() + 30.0
        while (found := run("docker", "inspect", "-f", "{{.State.Health.Status}}", container).strip()) == "starting":
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert found == health, run("docker", "inspect", "-f", "{{json .State.Health}}", container)
    finally:
        run("docker", "rm", "-f", container)


def test_four_workers_train_the_digits(image: str) -> None:
    compose = [*compose_command(), "-p", PROJECT, "-f", "deploy/compose.yaml"]
    try:
        run(
            *compose, "up", "-d", "--no-build", "--scale", f"worker={WORKERS}", PACELINE_EPOCHS="20", PACELINE_PAUSE="0"
        )
        workers = _containers("worker")
        assert len(workers) == WORKERS
        codes = run("docker", "wait", *workers, timeout=180.0).split()
        logs = {worker: _logs(worker) for worker in workers}
        assert codes == ["0"] * WORKERS, logs
        # One worker has rank 0, and says how well it went.
        told = [float(share) for log in logs.values() for share in re.findall(r"\[0\] accuracy (0\.\d+)", log)]
        assert len(told) == 1, logs
        assert told[0] >= 0.95
        (coordinator,) = _containers("coordinator")
        run("docker", "exec", coordinator, "python3", "-m", "paceline.cli.health", "127.0.0.1:7400")
        jobs = run("docker", "exec", coordinator, "paceline", "status", "--coordinator", "127.0.0.1:7400", "--json")
        assert '"name": "digits"' in jobs
        stranger = ["docker", "exec", coordinator, "env", "-u", "PACELINE_TOKEN", "paceline", "status"]
        told = subprocess.run([*stranger, "--coordinator", "127.0.0.1:7400"], capture_output=True, text=True)
        assert "it wants a token" in told.stderr
        worker = ["docker", "exec", "-e", f"PACELINE_TOKEN={TOKENS['WORKER_TOKEN']}", coordinator, "paceline"]
        forget = [*worker, "restart", "digits", "--forget", "--coordinator", "127.0.0.1:7400"]
        assert "the role 'worker'" in subprocess.run(forget, capture_output=True, text=True).stderr
        for container in (coordinator, *workers):
            _check_confinement(container)
        run(*compose, "stop", "-t", "10", "coordinator")
        assert run("docker", "inspect", "-f", "{{.State.ExitCode}}", coordinator).strip() == "0"
        assert "Traceback" not in _logs(coordinator)
    finally:
        run(*compose, "down", "-v", "--remove-orphans", "-t", "1")


def test_training_continues_through_every_fault(image: str, tmp_path: Path) -> None:
    script = [
        sys.executable,
        str(ROOT / "deploy" / "chaos.py"),
        "--no-build",
        "--json",
        "--project",
        f"{PROJECT}-chaos",
    ]
    faults = ["kill", "more", "coordinator", "fewer", "pause", "disconnect", "move", "drop"]
    length = {"PACELINE_EPOCHS": "170", "PACELINE_PAUSE": "0.04"}  # no longer than the faults need, and a little
    out = run(*script, "--faults", ",".join(faults), "--audit", str(tmp_path), timeout=400.0, **length)
    print(out.rpartition("\n{")[0])
    told = json.loads(out.splitlines()[-1])
    found = {result["fault"]: result for result in told["faults"]}
    assert list(found) == faults
    assert told["accuracy"] >= 0.95
    assert told["wrong"] == []
    events = _events(tmp_path)
    assert next(event for event in events if event["event"] == "job")["steps"] == told["steps"]
    _check_samples(events, told["steps"])
    assert set(told["exit_codes"].values()) == {0}
    for fault in ("pause", "disconnect", "move", "drop"):
        assert found[fault]["others"] <= SILENCE_S + LATE_S, found[fault]
        assert found[fault]["back"] <= LATE_S, found[fault]
    assert found["kill"]["others"] <= SILENCE_S + LATE_S
    assert found["coordinator"]["gap"] < SILENCE_S  # a coordinator that is away stops nothing


def test_training_continues_after_the_leading_coordinator_is_killed(image: str, tmp_path: Path) -> None:
    """The overlay compose.etcd.yaml: the other coordinator leads, from the state in etcd, whose volume survives it."""
    build_etcd(ETCD)
    project, services = f"{PROJECT}-etcd", {"coordinator:7400": "coordinator", "coordinator-b:7400": "coordinator-b"}
    files = ("compose.yaml", "chaos.yaml", "compose.etcd.yaml")  # chaos.yaml has workers record what they do
    compose = [*compose_command(), "-p", project, *(word for file in files for word in ("-f", f"deploy/{file}"))]
    settings = {"ETCD_IMAGE": ETCD, "PACELINE_AUDIT": str(tmp_path), "PACELINE_EPOCHS": "9999"}
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)  # for the user of the containers
    try:
        run(*compose, "up", "-d", "--no-build", "--scale", "worker=2", **settings)
        workers = _containers("worker", project)
        first = _wait_for_status(workers[0], lambda status: _step(status) > 0)["leader"]

        (killed,) = _containers(services[first["address"]], project)
        at = time.time()
        run("docker", "kill", killed)
        found = _wait_for_status(workers[0], lambda status: _epoch(status) > first["epoch"])
        second = found["leader"]
        assert {first["address"], second["address"]} == {*services}
        _wait_for_status(workers[0], lambda status: _step(status) > _step(found))
        times = sorted(event["at"] for event in _events(tmp_path) if event["event"] == "committed" and event["at"] > at)
        assert max(b - a for a, b in pairwise([at, *times])) < SILENCE_S  # no step waits for a coordinator

        run("docker", "start", killed)
        run(*compose, "rm", "-s", "-f", "etcd", **settings)
        _wait_until_none_leads(workers[0])
        run(*compose, "up", "-d", "--no-build", "--no-deps", "etcd", **settings)
        third = _wait_for_status(workers[0], lambda status: _step(status) > 0 and _epoch(status) > second["epoch"])
        assert third["jobs"][0]["generation"] == found["jobs"][0]["generation"]
        (etcd,) = _containers("etcd", project)
        check = json.loads(run("docker", "inspect", "-f", "{{json .Config.Healthcheck.Test}}", etcd))
        run("docker", "exec", etcd, *check[1:])

        run(*compose, "stop", "-t", "30", "worker", **settings)
        assert run("docker", "wait", *workers).split() == ["0", "0"]
        events = _events(tmp_path)
        _check_samples(events, max(event["step"] for event in events if event["event"] == "applied"))
    finally:
        run(*compose, "down", "-v", "--remove-orphans", "-t", "1", **settings)


def _wait_for_status(worker: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Returns the answer of `paceline status --json` in a worker's container, once it is the expected one."""
    deadline = time.monotonic() + 60.0
    while True:
        command = ["docker", "exec", worker, "paceline", "status", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0)
        if done.returncode == 0:
            status: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            if status["jobs"] and wanted(status):
                return status
        assert time.monotonic() < deadline, f"{done.stdout}{done.stderr}\n{_logs(worker)}"


def _wait_until_none_leads(worker: str) -> None:
    """Returns once `paceline status` in a worker's container finds no coordinator that leads."""
    deadline = time.monotonic() + 60.0
    command = ["docker", "exec", worker, "paceline", "status"]
    while subprocess.run(command, capture_output=True, timeout=60.0).returncode == 0:
        assert time.monotonic() < deadline, f"a coordinator leads without etcd\n{_logs(worker)}"


def _epoch(status: dict[str, Any]) -> int:
    return int(status["leader"]["epoch"])


def _step(status: dict[str, Any]) -> int:
    """The last committed step of a job of two workers; 0 before it has any."""
    (job,) = status["jobs"]
    return int(job["totals"]["step"] or 0) if job["world_size"] == 2 else 0


def _check_confinement(container: str) -> None:
    """What the engine has made of the compose file."""
    config = json.loads(run("docker", "inspect", "-f", "{{json .HostConfig}}", container))
    assert config["ReadonlyRootfs"]
    assert config["Init"]
    assert config["CapDrop"] == ["ALL"]
    assert config["SecurityOpt"] == ["no-new-privileges:true"]
    assert config["Memory"] in (512 << 20, 2 << 30)
    assert config["PidsLimit"] == 512


def _events(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of all workers (deploy/audited.py)."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a last one may be half written


def _check_samples(events: list[dict[str, Any]], last: int) -> None:
    """I6: the line has all steps up to that one, and each step used each sample of its batch once."""
    job = next(event for event in events if event["event"] == "job")
    line: dict[int, int] = {}
    for event in events:
        if event["event"] == "applied":
            line[event["step"]] = max(line.get(event["step"], 0), event["generation"])
    assert sorted(line) == list(range(1, last + 1))
    used: dict[int, list[int]] = {}
    for event in events:
        if event["event"] == "attempt" and line.get(event["step"]) == event["generation"]:
            used.setdefault(event["step"], []).extend(event["indices"])
    sampler = paceline.ElasticSampler(job["samples"], global_batch=128)
    for step in line:
        assert sorted(used[step]) == sorted(sampler.batch(step - 1).tolist()), step


def _containers(service: str, project: str = PROJECT) -> list[str]:
    """By label, for `ps` of Compose v2 leaves out those that have ended."""
    labels = (f"com.docker.compose.project={project}", f"com.docker.compose.service={service}")
    return run("docker", "ps", "-aq", *(word for label in labels for word in ("--filter", f"label={label}"))).split()


def _logs(container: str) -> str:
    done = subprocess.run(["docker", "logs", container], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
