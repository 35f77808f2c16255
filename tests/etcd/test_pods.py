"""The pods of deploy/kubernetes-etcd run as processes of this machine: two coordinators, an etcd, workers.

The commands and variables are those of the manifests, as the kubelet resolves them. Only what a node would provide is
replaced: mounted folders, addresses, and etcd's port for other etcd nodes, which in a pod nobody else has.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support import manifests
from support.command import Command, command
from support.etcd import needs_etcd
from support.pods import Node

pytestmark = [pytest.mark.needs(what="etcd"), needs_etcd, pytest.mark.timeout(180)]

FOUND = manifests.load(Path(__file__).parents[2] / "deploy" / "kubernetes-etcd")
TEMPLATES = {
    (m["kind"], m["metadata"]["name"]): template for m in FOUND if (template := manifests.template_of(m)) is not None
}
COORDINATOR = TEMPLATES["StatefulSet", "paceline-coordinator"]
WORKER = TEMPLATES["Deployment", "paceline-worker"]
ETCD = TEMPLATES["StatefulSet", "paceline-etcd"]
PODS = ["paceline-coordinator-0", "paceline-coordinator-1"]
AT = {pod: f"{pod}.paceline-coordinators:7400" for pod in PODS}
ETCD_AT, PEERS_AT, METRICS_AT = "paceline-etcd:2379", "localhost:2380", "0.0.0.0:2381"


@contextmanager
def etcd_pod(node: Node) -> Iterator[None]:
    """The pod of etcd, from the moment when its probe says that it is ready."""
    words, variables = node.start(ETCD, {}, ETCD_AT)
    variables |= {"PATH": os.environ["PATH"]}
    (container,) = ETCD["spec"]["containers"]
    probe = container["readinessProbe"]["httpGet"]
    assert probe["port"] == container["ports"][1]["name"]
    with (node.folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(words, env=variables, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30.0
        while not _is_ready(f"http://{node.addresses[METRICS_AT]}{probe['path']}"):
            assert process.poll() is None, (node.folder / "etcd.log").read_text()
            assert time.monotonic() < deadline, (node.folder / "etcd.log").read_text()
        yield
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    """Returns True if the kubelet would take the pod for ready by what its URL answers."""
    try:
        with urllib.request.urlopen(url, timeout=5.0) as answer:
            return bool(200 <= answer.status < 400)
    except OSError:
        return False


def coordinator_pod(node: Node, pod: str) -> tuple[list[str], dict[str, str]]:
    """The command line and the variables of one of the two."""
    return node.start(COORDINATOR, {"metadata.name": pod}, AT[pod])


def leader_of(node: Node, pod: str) -> dict[str, Any]:
    """What `kubectl exec POD -- paceline status` says of the leader, asked with both addresses."""
    _, variables = coordinator_pod(node, pod)
    addresses = ",".join(node.addresses[AT[each]] for each in PODS)
    words = [sys.executable, "-m", "paceline", "status", "--json", "--coordinator", addresses]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    leader: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["leader"]
    return leader


def probe(node: Node, pod: str) -> None:
    """Runs each probe of a coordinator's container in it."""
    _, variables = coordinator_pod(node, pod)
    (container,) = COORDINATOR["spec"]["containers"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        python, *words, asked = container[kind]["exec"]["command"]
        assert (python, asked) == ("python3", "127.0.0.1:7400")
        done = subprocess.run(
            [sys.executable, *words, node.addresses[AT[pod]]], env=variables, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr


def check_who_may_call_etcd(node: Node) -> None:
    """A coordinator with its certificate; neither somebody without one nor a worker, whose authority is another one."""
    host, _, port = node.addresses[ETCD_AT].rpartition(":")
    for name, is_let_in in (("etcd/client", True), ("member/member", False), ("", False)):
        tls = ssl.create_default_context(cafile=node.folder / "etcd" / "ca.pem")
        if name:
            tls.load_cert_chain(node.folder / f"{name}.pem", node.folder / f"{name}.key")
        answer = b""
        with (
            suppress(ssl.SSLError, ConnectionError),
            socket.create_connection((host, int(port))) as plain,
            tls.wrap_socket(plain, server_hostname=host) as call,
        ):
            call.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            answer = call.recv(8)
        assert answer == (b"HTTP/1.0" if is_let_in else b""), name


def check_that_workers_do_not_operate(words: list[str], variables: dict[str, str]) -> None:
    """With what a worker's pod has nobody ends its job, and nobody is a worker of another one."""
    for command_, needs in (
        (["restart", "digits", "--force"], "this call needs 'operator'"),
        ([words[0], "--job", "other", *words[1:]], "the token is valid for another job"),
    ):
        asked = [sys.executable, "-m", "paceline", *command_]
        done = subprocess.run(asked, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)
        assert done.returncode != 0
        assert needs in done.stderr


def test_the_standby_pod_takes_over_after_the_leader_is_killed(tmp_path: Path) -> None:
    node = Node(tmp_path, [*AT.values(), ETCD_AT, PEERS_AT, METRICS_AT])
    with ExitStack() as stack:
        stack.enter_context(etcd_pod(node))
        running: dict[str, Command] = {}
        for pod in PODS:
            words, variables = coordinator_pod(node, pod)
            running[pod] = stack.enter_context(command(*words, **variables))
        for pod in PODS:
            running[pod].wait_for("leads in epoch 1")
            probe(node, pod)  # a standby is well, too

        words, variables = node.start(WORKER, {}, AT[PODS[0]])
        words[words.index("--epochs") + 1] = "20"
        workers = [stack.enter_context(command(*words, **variables)) for _ in range(2)]
        for worker in workers:
            worker.wait_for("of 2", timeout=60.0)

        check_who_may_call_etcd(node)
        check_that_workers_do_not_operate(words, variables)
        first = leader_of(node, PODS[0])
        (leader,) = [pod for pod in PODS if node.addresses[AT[pod]] == first["address"]]
        (standby,) = {*PODS} - {leader}
        running[leader].process.send_signal(signal.SIGKILL)
        for worker in workers:
            worker.wait_for("reconnected to the coordinator")
        second = leader_of(node, standby)
        assert second == {"address": node.addresses[AT[standby]], "epoch": 2}

        words, variables = coordinator_pod(node, leader)  # the StatefulSet starts it again, under its name
        again = stack.enter_context(command(*words, **variables))
        again.wait_for(f"{second['address']} leads in epoch 2")
        probe(node, leader)

        node.brake.unlink()
        assert [worker.wait() for worker in workers] == [0, 0]
        assert "after 240 steps, 2 workers at the end" in "".join(worker.stdout for worker in workers)
        assert "is void" not in running[standby].stderr, "nothing was undone"
