"""What the manifests say of a container, run by Docker: as nobody, on files that nobody changes, with token and TLS."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.docker import build, engine

from support import manifests
from support.certificates import LOOPBACK, make_folder

pytestmark = [pytest.mark.needs(what="containers"), pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
IMAGE = "paceline-test"
NETWORK = "paceline-test-manifests"
PODS: dict[str, dict[str, Any]] = {
    m["metadata"]["name"]: m["spec"]["template"]["spec"]
    for m in manifests.load(ROOT / "deploy" / "kubernetes")
    if m["kind"] == "Deployment"
}


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return (done.stdout + done.stderr).strip()


@pytest.fixture
def network() -> Iterator[str]:
    with engine():
        build(IMAGE)
        # A run that was killed leaves its network behind.
        subprocess.run(["docker", "network", "rm", NETWORK], capture_output=True, timeout=120, check=False)
        docker("network", "create", NETWORK)
        try:
            yield NETWORK
        finally:
            if left := docker("ps", "-aq", "--filter", f"network={NETWORK}").split():
                docker("rm", "-f", *left)
            docker("network", "rm", NETWORK)


def make_secrets(folder: Path) -> None:
    """As the kustomization's first lines say, each in a folder of its name; of root and the pods' group, as mounted."""
    made = make_folder(folder / "tls", hosts=[*LOOPBACK, "paceline-coordinator"]).path
    for secret, names in (
        ("paceline-tls-coordinator", ("coordinator.pem", "coordinator.key")),
        ("paceline-tls-member", ("ca.pem", "member.pem", "member.key")),
    ):
        (folder / secret).mkdir()
        for name in names:
            (folder / secret / name).write_bytes((made / name).read_bytes())
    operator, worker = "an-operators-token-of-this-test", "a-workers-token-of-this-test"
    for secret, name, text in (
        ("paceline-tokens", "tokens", f"{operator}\n{worker} role=worker digits\n"),
        ("paceline-token", "token", worker),
    ):
        (folder / secret).mkdir()
        (folder / secret / name).write_text(text)
    for path in folder.glob("paceline-*/*"):
        os.chown(path, 0, PODS["paceline-worker"]["securityContext"]["fsGroup"])
        path.chmod(0o440)


def start(name: str, folder: Path, *, service: str = "") -> str:
    """A container as the pod of that deployment has it, with secrets from that folder; returns its id."""
    pod = PODS[name]
    (container,) = pod["containers"]
    words = ["run", "-d", "--network", NETWORK, *(["--network-alias", service] if service else [])]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    words += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    words += ["--user", f"{pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}"]
    words += ["--memory", container["resources"]["limits"]["memory"].removesuffix("i")]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for number, mount in enumerate(container["volumeMounts"]):
        if (secret := volumes[mount["name"]].get("secret")) is not None:
            words += ["-v", f"{folder / secret['secretName']}:{mount['mountPath']}:ro"]
            continue
        own = Path(tempfile.mkdtemp(prefix=str(number), dir=folder))
        own.chmod(0o777)  # as an emptyDir is, and a claim's volume for its fsGroup
        words += ["-v", f"{own}:{mount['mountPath']}"]
    for entry in container["env"]:
        words += ["-e", f"{entry['name']}={entry['value']}"]
    return docker(*words, IMAGE, *container["args"])


def remove(worker: str) -> float:
    """What the kubelet does to a pod that goes: its hook, then SIGTERM, then SIGKILL; returns the hook's seconds."""
    pod = PODS["paceline-worker"]
    (container,) = pod["containers"]
    began = time.monotonic()
    hook = ["docker", "exec", worker, *container["lifecycle"]["preStop"]["exec"]["command"]]
    ended = subprocess.run(hook, timeout=pod["terminationGracePeriodSeconds"])
    held = time.monotonic() - began
    assert ended.returncode == 137  # with process 1
    assert docker("inspect", "-f", "{{.State.Running}}", worker) == "false", "the hook did not wait for the drain"
    return held


def test_containers_of_the_manifests_train_and_leave_in_order(network: str, tmp_path: Path) -> None:
    make_secrets(tmp_path)
    for path in (tmp_path, *tmp_path.glob("paceline-*")):
        path.chmod(0o755)
    coordinator = start("paceline-coordinator", tmp_path, service="paceline-coordinator")
    workers = [start("paceline-worker", tmp_path) for _ in range(3)]
    deadline = time.monotonic() + 60.0
    while "rank 0 of 3" not in (said := "".join(docker("logs", worker) for worker in workers)):
        assert time.monotonic() < deadline, f"{said}\n{docker('logs', coordinator)}"
        time.sleep(0.1)
    (container,) = PODS["paceline-coordinator"]["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        docker("exec", coordinator, *container[probe]["exec"]["command"])
    status = ["status", "--coordinator", "127.0.0.1:7400"]
    assert "digits" in docker("exec", coordinator, "paceline", *status)
    stranger = ["docker", "exec", coordinator, "env", "-u", "PACELINE_TOKEN_FILE", "paceline", *status]
    refused = subprocess.run(stranger, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "it wants a token" in refused.stderr
    assert "with TLS; callers need a certificate and a token" in docker("logs", coordinator)
    stranger = ["docker", "exec", coordinator, "env", *(f"-uPACELINE_TLS_{name}" for name in ("CA", "CERT", "KEY"))]
    refused = subprocess.run([*stranger, "paceline", *status], capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "TLS" in refused.stderr, refused.stderr
    assert remove(workers[1]) < 10.0  # well before the hook's end
    assert docker("inspect", "-f", "{{.State.ExitCode}}", workers[1]) == "0"  # the launcher's: its worker left well
    assert "Traceback" not in docker("logs", workers[1])
    said = docker("logs", coordinator)
    assert "2 members of generation" in said, said
    assert "is void" not in said, said  # it left at the end of a step
    docker("stop", "-t", "30", coordinator)
    assert docker("inspect", "-f", "{{.State.ExitCode}}", coordinator) == "0"
