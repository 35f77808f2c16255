"""`paceline run --notice` against metadata services that answer as those of the clouds do."""

from __future__ import annotations

import json
import re
import signal
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.command import command

TRAIN = """
    import os, time
    import numpy as np
    import paceline
    from paceline import nn

    with paceline.join() as session:
        model = nn.Linear(4, 2, rng=np.random.default_rng(1))
        ddp = paceline.DDP(model, session.group)
        optimizer = paceline.optim.SGD(model, lr=0.1)
        x = np.zeros((60, 4), np.float32)
        t = np.zeros(60, np.int64)
        sampler = paceline.ElasticSampler(len(x), global_batch=12)
        state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
        said = False
        for step in session.steps(state, total=100_000):
            with step:
                time.sleep(float(os.environ.get("STEP_S", "0.01")))
                loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), t[step.indices])
                optimizer.zero_grad()
                ddp.backward(dy, step.weight)
                optimizer.step()
            if step.applied and not said:
                said = True
                print("trains")
"""


class Service(ThreadingHTTPServer):
    """All three clouds' services; `taken` is what AWS, Google and Azure say from then on.

    Attributes:
        asked: method and path of each request, in order.
        tokens: how many tokens it has given; only the latest is good.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.taken = threading.Event()
        self.asked: list[str] = []
        self.tokens = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        self.server.asked.append(f"PUT {self.path}")
        if self.path != "/latest/api/token" or self.headers["X-aws-ec2-metadata-token-ttl-seconds"] != "21600":
            return self.answer(400)
        self.server.tokens += 1
        return self.answer(200, f"token{self.server.tokens}")

    def do_GET(self) -> None:
        self.server.asked.append(f"GET {self.path}")
        taken = self.server.taken.is_set()
        match self.path.partition("?")[0]:
            case "/latest/meta-data/spot/instance-action":
                if self.headers["X-aws-ec2-metadata-token"] != f"token{self.server.tokens}":
                    return self.answer(401)
                notice = {"action": "terminate", "time": "2026-11-25T08:22:00Z"}
                return self.answer(200, json.dumps(notice)) if taken else self.answer(404)
            case "/computeMetadata/v1/instance/preempted" if self.headers["Metadata-Flavor"] == "Google":
                return self.answer(200, "TRUE" if taken else "FALSE")
            case "/computeMetadata/v1/instance/maintenance-event" if self.headers["Metadata-Flavor"] == "Google":
                return self.answer(200, "NONE")
            case "/metadata/instance/compute/name" if self.headers["Metadata"] == "true":
                return self.answer(200, "vmss_1")
            case "/metadata/scheduledevents" if self.headers["Metadata"] == "true":
                machine = "vmss_1" if taken else "vmss_0"
                events = [{"EventType": "Preempt", "Resources": [machine], "NotBefore": ""}]
                return self.answer(200, json.dumps({"DocumentIncarnation": 1, "Events": events}))
        return self.answer(400)

    def answer(self, status: int, body: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cloud", "why"),
    [
        ("aws", "AWS will terminate this spot instance at 2026-11-25T08:22:00Z"),
        ("gcp", "Google Cloud preempts this machine"),
        ("azure", "Azure will take this spot machine at any moment"),
    ],
)
def test_workers_drain_when_the_cloud_takes_the_machine(cloud: str, why: str, service: Service, script: str) -> None:
    arguments = ("run", "-n", "2", "--min", "1", "--notice", cloud, "--drained-code", "75", script)
    with command(*arguments, PACELINE_NOTICE_URL=service.url, http_proxy="http://127.0.0.1:1") as run:
        run.wait_for("trains", 2)
        assert "stopping" not in run.stderr
        service.taken.set()
        assert run.wait() == 75
    assert re.findall("paceline: stopping .*", run.stderr) == [f"paceline: stopping 2 workers: {why}"]


@pytest.mark.slow
def test_a_first_sigterm_after_the_notice_does_not_kill_workers(service: Service, script: str) -> None:
    arguments = ("run", "-n", "2", "--min", "1", "--notice", "aws", "--drained-code", "75", script)
    with command(*arguments, PACELINE_NOTICE_URL=service.url, STEP_S="1.5") as run:
        run.wait_for("trains", 2)
        service.taken.set()
        run.wait_for("stopping 2 workers")
        run.signal(signal.SIGTERM)  # the machine shuts down while both are in a step
        assert run.wait() == 75
    assert "killing" not in run.stderr


@pytest.mark.slow
def test_an_expired_token_is_fetched_again(service: Service, script: str) -> None:
    with command("run", "-n", "1", "--max", "2", "--notice", "aws", script, PACELINE_NOTICE_URL=service.url) as run:
        run.wait_for("trains")
        service.tokens += 1  # the launcher's is not good any more
        given = service.tokens
        run.wait_for("gives no usable answer (HTTP Error 401: Unauthorized)")
        service.taken.set()
        assert run.wait() == 0
    assert service.tokens > given
    assert run.stderr.count("metadata service") == 1


@pytest.mark.slow
def test_an_unreachable_metadata_service_is_reported_once(script: str) -> None:
    with command(
        "run", "-n", "1", "--max", "2", "--notice", "gcp", script, PACELINE_NOTICE_URL="http://127.0.0.1:1"
    ) as run:
        run.wait_for("the metadata service at http://127.0.0.1:1 gives no usable answer")
        run.wait_for("trains")
    assert run.stderr.count("metadata service") == 1


def test_an_unknown_cloud_is_refused(script: str) -> None:
    with command("run", "--notice", "aws,moon", script) as run:
        assert run.wait() == 2
    assert "there is no provider 'moon'" in run.stderr
