"""What the Job's manifest says of its pods, run as processes of this machine under a Job controller in a page.

The containers' arguments, variables, secrets and hooks are those of the manifests. Only what a node would provide is
replaced: mounted folders, the service's address, fields of the pod, and process 1.
"""

from __future__ import annotations

import copy
import re
import signal
import ssl
import subprocess
from contextlib import ExitStack, closing
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline import checkpoint
from support import manifests
from support.command import Command, command
from support.pods import Node

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).parents[2]
FOUND = manifests.load(ROOT / "deploy" / "kubernetes" / "job")
(JOB,) = [manifest for manifest in FOUND if manifest["kind"] == "Job"]
(COORDINATOR,) = [manifest for manifest in FOUND if manifest["kind"] == "Deployment"]


class JobController:
    """Kubernetes' Job controller, as far as an indexed Job with a failure policy needs it (its documentation)."""

    def __init__(self, manifest: dict[str, Any], node: Node, stack: ExitStack) -> None:
        self.spec = manifest["spec"]
        label = "metadata.labels['batch.kubernetes.io/job-name']"
        self._fields = {label: manifest["metadata"]["name"]}
        self._node, self._stack = node, stack
        self.pods: dict[int, Command] = {}
        self.moved: set[int] = set()
        self.succeeded: set[int] = set()
        self.failures = 0

    def reconcile(self) -> None:
        """Starts a pod for each index that has neither one nor succeeded, and handles those that have ended."""
        for index, pod in list(self.pods.items()):
            code = pod.process.poll()
            if code is None:
                continue
            del self.pods[index]
            if code == 0:
                self.succeeded.add(index)
            elif self._action(code if code > 0 else 128 - code, index in self.moved) == "Count":
                self.failures += 1
            self.moved.discard(index)
        assert self.failures <= self.spec["backoffLimit"]
        for index in range(self.spec["completions"]):
            if index not in self.pods and index not in self.succeeded and len(self.pods) < self.spec["parallelism"]:
                arguments, variables = self._node.start(self.spec["template"], self._fields)
                self.pods[index] = self._stack.enter_context(command(*arguments, **variables))

    def _action(self, code: int, moved: bool) -> str:
        for rule in self.spec["podFailurePolicy"]["rules"]:
            conditions = [condition["type"] for condition in rule.get("onPodConditions", ())]
            if ("DisruptionTarget" in conditions and moved) or code in rule.get("onExitCodes", {}).get("values", ()):
                return str(rule["action"])
        return "Count"

    def drain(self, index: int) -> None:
        """Moves a pod as the eviction of a drained node does: the hook, until process 1 has ended."""
        (container,) = self.spec["template"]["spec"]["containers"]
        shell = container["lifecycle"]["preStop"]["exec"]["command"]
        pod = self.pods[index]
        self.moved.add(index)
        hook = subprocess.Popen([*shell[:2], shell[2].replace(" 1 ", f" {pod.process.pid} ")], start_new_session=True)
        try:
            assert pod.process.wait(30) == manifests.DRAINED
        finally:  # it lies in the container's namespace, and ends with process 1
            hook.kill()
            hook.wait()


def scraped(node: Node, port: int) -> str:
    """Returns the metrics that Prometheus gets from a coordinator's pod, by its configuration for Kubernetes."""
    config = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus-kubernetes.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    ca, cert, key = (
        node.folder / "member" / Path(scrape["tls_config"][f"{n}_file"]).name for n in ("ca", "cert", "key")
    )
    trusting = ssl.create_default_context(cafile=ca)
    trusting.load_cert_chain(cert, key)
    with closing(HTTPSConnection(scrape["tls_config"]["server_name"], port, context=trusting)) as call:
        call.request("GET", "/metrics", headers={"Authorization": f"Bearer {node.reader}"})
        answer = call.getresponse()
        assert answer.status == 200
        return answer.read().decode()


def test_the_job_completes_while_pods_die_and_move(tmp_path: Path) -> None:
    node = Node(tmp_path, ["paceline-coordinator:7400"])
    job = copy.deepcopy(JOB)
    job["spec"].update(completions=3, parallelism=3)
    arguments, variables = node.start(COORDINATOR["spec"]["template"], {})
    with ExitStack() as stack:
        coordinator = stack.enter_context(command(*arguments, **variables))
        coordinator.wait_for("/metrics")
        port = re.search(r":(\d+)/metrics", coordinator.stdout + coordinator.stderr)
        assert port is not None
        assert "paceline_certificate_expiry_time_seconds" in scraped(node, int(port[1]))
        jobs = JobController(job, node, stack)
        args = jobs.spec["template"]["spec"]["containers"][0]["args"]
        args[args.index("--epochs") + 1] = "60"  # 720 steps in place of 3,600
        jobs.reconcile()
        first, second, third = jobs.pods.values()
        first.wait_for("of 3", timeout=60.0)

        second.process.send_signal(signal.SIGKILL)  # out of memory, for example
        second.process.wait()
        jobs.reconcile()
        assert jobs.failures == 1
        assert list(jobs.pods) == [0, 2, 1]
        jobs.pods[1].wait_for("of 3", timeout=60.0)

        jobs.drain(2)
        assert "Traceback" not in third.stderr
        jobs.reconcile()
        assert jobs.failures == 1, "a pod that is moved has not failed"
        assert 2 not in jobs.succeeded, "its index is not done"
        jobs.pods[2].wait_for("of 3", timeout=60.0)

        jobs.spec.update(completions=4, parallelism=4)  # kubectl patch job
        jobs.reconcile()
        jobs.pods[3].wait_for("of 4", timeout=60.0)

        node.brake.unlink()
        last = list(jobs.pods.values())
        for pod in last:
            pod.process.wait(120)
        jobs.reconcile()
        assert jobs.succeeded == {0, 1, 2, 3}, "the Job is complete"
        assert jobs.failures == 1
        assert "after 720 steps, 4 workers at the end" in "".join(pod.stdout for pod in last)
        assert checkpoint.tags(tmp_path / "checkpoints" / "paceline-digits")
        assert coordinator.stderr.count("is void") == 1, "the drained worker left at the end of a step"
