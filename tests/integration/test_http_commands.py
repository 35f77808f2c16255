"""`--http`: what is refused, the URL that is printed, and a run that its page watches and drains."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from paceline.cli.app import app
from paceline_server import Coordinator, ServerSettings
from paceline_server.settings import HttpUnusable
from pacelinepb import install_command
from support.chrome_format import check_trace
from support.command import Command, command
from support.coordinator import PATIENCE, run

TOKEN = "a-token-of-the-environment-0123456789"

STEPS = """
import json
import numpy as np
import paceline
from paceline import nn

with paceline.join() as session:
    model = nn.Linear(4, 2, rng=np.random.default_rng(0))
    optimizer = paceline.optim.SGD(model, lr=0.01)
    ddp = paceline.DDP(model, session.group)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=paceline.ElasticSampler(64, global_batch=8))
    x, t = np.ones((64, 4), np.float32), np.zeros(64, int)
    try:
        for step in session.steps(state, total=1_000_000):
            with step:
                loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
                optimizer.zero_grad()
                ddp.backward(dy, step.weight)
                optimizer.step()
    finally:
        print("stats", json.dumps(session.stats()))
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("coordinator", "--http", "0.0.0.0:0"), "anyone who can reach 0.0.0.0:0 can view every job, and stop it"),
        (("coordinator", "--http", "127.0.0.1:99999"), "99999"),
        (("run", "--http", "--coordinator", "127.0.0.1:1", __file__), "start that with paceline coordinator --http"),
    ],
)
def test_unsafe_or_invalid_http_options_are_refused(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.stderr


@pytest.mark.parametrize("name", ["aiohttp", "prometheus_client"])
def test_a_missing_package_is_named_with_its_install_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else honest(wanted))
    for arguments in (("coordinator", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"), ("run", "--http", __file__)):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2, result.stderr
        assert f"(--http) need {name}: {install_command('http')}" in result.stderr

    async def main() -> None:
        await Coordinator(ServerSettings(listen="127.0.0.1:0", http="127.0.0.1:0")).start()

    with pytest.raises(HttpUnusable, match=f"need {name}"):
        run(main)


class Page:
    """The page of a command, by the URL that it has printed."""

    def __init__(self, ended: Command) -> None:
        ended.wait_for("the page is at")
        found = re.search(r"the page is at (http://127\.0\.0\.1:\d+/)(?:#token=(\w+))?(.*)", ended.stderr)
        assert found is not None, ended.stderr
        self.url, self.token, self.rest = found.groups()

    def ask(self, path: str, token: str | None, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=10) as answer:
            return json.loads(answer.read())

    def watch(self, job: str) -> Iterator[dict[str, Any]]:
        """What the stream says of a job, for ever."""
        request = urllib.request.Request(
            f"{self.url}api/stream?job={job}", headers={"Authorization": f"Bearer {self.token}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            for line in answer:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])


def test_a_coordinator_prints_its_page_url_without_the_token() -> None:
    with command("coordinator", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", PACELINE_TOKEN=TOKEN) as serving:
        page = Page(serving)
        assert page.token is None
        assert page.rest.startswith(f"; metrics are at {page.url}metrics")
        assert page.ask("api/session", None)["needs_token"]
        assert page.ask("api/jobs", TOKEN) == {"jobs": []}
        assert TOKEN not in str(serving)


def test_a_run_is_watched_and_drained_through_its_page(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    with command("run", "-n", "2", "--min", "1", "--http", str(script)) as training:
        page = Page(training)
        assert page.token, "it lets this user in"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            page.ask("api/jobs", None)
        assert page.ask("api/session", page.token)["may_drain"]
        training.wait_for("paceline:")
        jobs: list[Any] = []
        while not jobs:
            jobs = page.ask("api/jobs", page.token)["jobs"]
        for message in page.watch("default"):
            totals = message["job"]["totals"]
            if totals["committed"] > 3 and totals["samples"] and sum(totals["sent_bytes"].values()):
                break
        assert 0.0 < totals["goodput"] <= 1.0
        assert set(totals["sent_bytes"]) <= {"shm", "tcp", "grpc"}
        told = page.ask("api/jobs/default/drain", page.token, {"members": []})
        assert len(told["member_ids"]) == 2
        training.wait()
    stats = [json.loads(line.partition("stats ")[2]) for line in training.stdout.splitlines() if "stats " in line]
    assert len(stats) == 2
    for each in stats:
        assert each["steps"] >= 3
        assert each["samples"] >= 4 * each["steps"] > 0
        assert each["sent_bytes"] == sum(each[f"sent_bytes/{kind}"] for kind in ("shm", "tcp", "grpc")) > 0
        assert each["collective_seconds"] > 0
        assert each["undone"] == 0


def test_a_token_of_the_environment_is_not_printed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    with command("run", "--http", str(script), PACELINE_TOKEN=TOKEN) as ended:
        page = Page(ended)
        assert ended.wait() == 0
    assert page.token is None
    assert page.rest == "; it asks for the token in PACELINE_TOKEN"
    assert TOKEN not in str(ended)


ENDS = """
import sys
import numpy as np
import paceline

with paceline.join() as session:
    print("rank", session.rank, flush=True)
    if sys.argv[1] == "steps":
        model = paceline.nn.Linear(4, 2, rng=np.random.default_rng(0))
        optimizer = paceline.optim.SGD(model, lr=0.01)
        ddp = paceline.DDP(model, session.group)
        state = paceline.TrainState(model=model, optimizer=optimizer)
        for step in session.steps(state, total=30):
            with step:
                loss, dy = paceline.nn.softmax_cross_entropy(ddp(np.ones((4, 4), np.float32)), np.zeros(4, int))
                optimizer.zero_grad()
                ddp.backward(dy)
                optimizer.step()
    else:
        for _ in range(30):
            session.group.all_reduce(np.ones(4, np.float32))
"""


@pytest.mark.parametrize("kind", ["steps", "collectives"])
def test_a_viewer_of_a_run_sees_its_end(kind: str, tmp_path: Path) -> None:
    """The workers end at once, long before the next message of the stream is due."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    with command("run", "-n", "2", "--http", str(script), kind) as training:
        page = Page(training)

        async def watch() -> list[dict[str, Any]]:
            headers = {"Authorization": f"Bearer {page.token}"}
            async with aiohttp.ClientSession(page.url, headers=headers) as http:
                while True:
                    async with http.get("/api/stream?job=default") as answer, asyncio.timeout(PATIENCE):
                        if answer.status == 404:  # no worker has joined yet
                            continue
                        assert answer.status == 200
                        whole = (await answer.content.read()).decode()
                        parts = [part.partition("data: ")[2] for part in whole.split("\n\n") if "data: " in part]
                        return [json.loads(part) for part in parts]

        *_, last = asyncio.run(watch())
        assert training.wait() == 0, str(training)
    assert "members_changed" not in last
    assert last["members"] == []
    assert sorted(gone["rank"] for gone in last["gone"]) == [0, 1]
    assert {gone["output"] for gone in last["gone"]} == {"rank 0", "rank 1"}
    if kind == "steps":
        assert last["job"]["phase"] == "finished"
        assert last["job"]["totals"]["step"] == 30


def test_a_run_is_asked_for_stacks_a_trace_and_lines_through_its_page(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(
        STEPS.replace("with step:\n", "with step:\n                print('step', step.number, flush=True)\n")
    )
    with command("run", "-n", "2", "--min", "1", "--http", str(script)) as training:
        page = Page(training)
        training.wait_for("step 5", 2)
        members = page.ask("api/jobs/default", page.token)["members"]
        for member in members:
            found: dict[str, Any] = {"lines": []}
            while not found["lines"]:  # the launcher shows them after a moment
                found = page.ask(f"api/jobs/default/output?member={member['member_id']}", page.token)
                assert found["trouble"] == ""
            assert re.fullmatch(r"step \d+", found["lines"][0])
        processes = page.ask("api/jobs/default/stacks", page.token)["processes"]
        assert {each["pid"] for each in processes} == {member["pid"] for member in members}
        for process in processes:
            (main,) = [each["frames"] for each in process["threads"] if each["main"]]
            assert any("steps.py:" in frame for frame in main), process
        trace = page.ask("api/jobs/default/trace", page.token)
        check_trace(trace)
        assert {each["pid"] for each in trace["traceEvents"] if each["ph"] == "X"} == {0, 1}
        assert all(each["uncertainty_s"] is not None for each in trace["otherData"]["clocks"]), "they are aligned"
        page.ask("api/jobs/default/drain", page.token, {"members": []})
        training.wait()
