"""The manifests hold what Kubernetes' own schemas ask, and what they say of each other is true; without a cluster."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
from paceline.cli.launcher import supervision
from support import manifests

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
MANIFESTS = manifests.load(FOLDER)


def test_nothing_is_wrong() -> None:
    assert manifests.problems(MANIFESTS) == []


def test_all_files_are_in_the_kustomization() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    files = {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}
    assert files == set(kustomization["resources"])
    images = {c["image"] for kind in ("coordinator", "worker") for c in _pod(MANIFESTS, kind)["containers"]}
    assert images == {image["name"] for image in kustomization["images"]}
    assert [image["newTag"] for image in kustomization["images"]] == [paceline.__version__]
    compose = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())
    named = {service["image"] for service in compose["services"].values()}
    assert named == {f"${{PACELINE_IMAGE:-paceline:{paceline.__version__}}}"}


def test_a_worker_has_the_time_that_its_launcher_gives_it() -> None:
    assert manifests._DRAIN_S == supervision.DRAIN_S
    held = int(_hook(MANIFESTS)["command"][-1].rpartition(" ")[2])
    assert held >= supervision.DRAIN_S + 2.0  # killed then, its processes end and its last lines come
    assert _pod(MANIFESTS, "worker")["terminationGracePeriodSeconds"] >= held + supervision.KILL_AFTER_S


def test_shared_memory_is_of_a_size_and_within_the_limit() -> None:
    (shm,) = [volume for volume in _pod(MANIFESTS, "worker")["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "512Mi"}
    (container,) = _pod(MANIFESTS, "worker")["containers"]
    assert container["resources"]["limits"]["memory"] == "2Gi"


Change = Callable[[list[dict[str, Any]]], object]

BROKEN: dict[str, tuple[Change, str]] = {
    "a typing error": (
        lambda m: _deployment(m, "worker")["spec"].update(replcas=3),
        "'replcas' was unexpected",
    ),
    "a number as a text": (lambda m: _deployment(m, "worker")["spec"].update(replicas="4"), "'4' is not of type"),
    "a variable that is no text": (
        lambda m: _pod(m, "worker")["containers"][0]["env"].append({"name": "X", "value": 2}),
        "2 is not of type",
    ),
    "a kind of another version": (lambda m: m[0].update(apiVersion="v2"), "there is no such kind in v2"),
    "a selector beside its pods": (
        lambda m: _deployment(m, "worker")["spec"]["template"]["metadata"]["labels"].update(
            {"app.kubernetes.io/component": "w"}
        ),
        "does not match its own pods",
    ),
    "a selector for both": (
        lambda m: _deployment(m, "worker")["spec"]["selector"]["matchLabels"].pop("app.kubernetes.io/component"),
        "matches the pods of Deployment paceline-coordinator too",
    ),
    "a service for nobody": (
        lambda m: _of(m, "Service")["spec"]["selector"].update({"app.kubernetes.io/name": "pace"}),
        "matches the pods of 0 deployments",
    ),
    "a port by another name": (
        lambda m: _of(m, "Service")["spec"]["ports"][0].update(targetPort="http"),
        "has no port http",
    ),
    "a claim that is not there": (
        lambda m: _of(m, "PersistentVolumeClaim")["metadata"].update(name="other"),
        "there is no claim paceline-coordinator",
    ),
    "two coordinators": (lambda m: _deployment(m, "coordinator")["spec"].update(replicas=2), "one replica"),
    "a mount of nothing": (
        lambda m: _pod(m, "worker")["volumes"].pop(),
        "mounts shm, which is no volume",
    ),
    "root": (lambda m: _pod(m, "worker")["securityContext"].update(runAsNonRoot=False), "may run as root"),
    "files that can be changed": (
        lambda m: _pod(m, "worker")["containers"][0]["securityContext"].pop("readOnlyRootFilesystem"),
        "may change its own files",
    ),
    "no limits": (lambda m: _pod(m, "worker")["containers"][0]["resources"].pop("limits"), "no limits of cpu"),
    "a probe of another port": (
        lambda m: _pod(m, "coordinator")["containers"][0]["livenessProbe"]["exec"].update(
            command=["python3", "-m", "paceline.cli.health", "127.0.0.1:7401"]
        ),
        "livenessProbe asks a port that is not open",
    ),
    "a coordinator elsewhere": (
        lambda m: _pod(m, "worker")["containers"][0]["env"][0].update(value="coordinator:7400"),
        "no service answers at coordinator:7400",
    ),
    "a token on no volume": (
        lambda m: _pod(m, "coordinator")["containers"][0]["env"][0].update(value="/etc/token"),
        "/etc/token is on no volume",
    ),
    "a key on no volume": (
        lambda m: _pod(m, "coordinator")["containers"][0]["args"].__setitem__(8, "/etc/key"),
        "/etc/key is on no volume",
    ),
    "no token": (lambda m: _pod(m, "coordinator")["containers"][0]["env"].pop(0), "has no token"),
    "a coordinator without TLS": (
        lambda m: _pod(m, "coordinator")["containers"][0].update(
            args=_pod(m, "coordinator")["containers"][0]["args"][:5]
        ),
        "talks in the clear",
    ),
    "a worker without a certificate": (
        lambda m: _pod(m, "worker")["containers"][0]["env"].remove(
            {"name": "PACELINE_TLS_CERT", "value": "/run/secrets/member/member.pem"}
        ),
        "talks in the clear",
    ),
    "no network policy": (lambda m: m.remove(_policy(m, "worker")), "Ingress is open to everybody"),
    "a policy for nobody": (
        lambda m: _policy(m, "worker")["spec"]["podSelector"]["matchLabels"].update({"app.kubernetes.io/name": "pace"}),
        "matches the pods of 0 deployments",
    ),
    "workers that are shut out": (
        lambda m: _policy(m, "coordinator")["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "w"}
        ),
        "Ingress shuts out Deployment paceline-worker",
    ),
    "a coordinator that cannot knock": (
        lambda m: _policy(m, "coordinator")["spec"].pop("egress"),
        "Egress shuts out Deployment paceline-worker",
    ),
    "a policy for another port": (
        lambda m: _policy(m, "coordinator")["spec"]["ingress"][0]["ports"][0].update(port="http"),
        "lets callers reach http",
    ),
    "a secret for everybody": (
        lambda m: _secret(m).pop("defaultMode"),
        "everybody may read the secret token",
    ),
    "no drain": (lambda m: _pod(m, "worker")["containers"][0].pop("lifecycle"), "no preStop that drains"),
    "a hook that drains nothing": (lambda m: _hook(m).update(command=["sleep", "35"]), "no preStop that drains"),
    "a hook that tells nobody": (lambda m: _hook(m)["command"].__setitem__(2, "sleep 35"), "no preStop that drains"),
    "a hook that does not wait": (
        lambda m: _hook(m)["command"].__setitem__(2, "kill -TERM 1 && sleep 5"),
        "no time to leave in good order",
    ),
    "no time to leave": (
        lambda m: _pod(m, "worker").update(terminationGracePeriodSeconds=35),
        "no time to leave in good order",
    ),
    "a budget that allows nothing": (
        lambda m: _of(m, "PodDisruptionBudget")["spec"].update(minAvailable=4),
        "no pod of Deployment paceline-worker could ever be moved",
    ),
    "a budget below the minimum": (
        lambda m: _of(m, "PodDisruptionBudget")["spec"].update(minAvailable=1),
        "keeps fewer than the 2 workers",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "text"), BROKEN.values(), ids=BROKEN)
@pytest.mark.sampled(3)
def test_what_is_broken_is_found(change: Change, text: str) -> None:
    broken = copy.deepcopy(MANIFESTS)
    change(broken)
    found = manifests.problems(broken)
    assert any(text in problem for problem in found), found


def _of(found: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (manifest,) = [m for m in found if m["kind"] == kind]
    return manifest


def _deployment(found: list[dict[str, Any]], component: str) -> dict[str, Any]:
    name = f"paceline-{component}"
    (manifest,) = [m for m in found if m["kind"] == "Deployment" and m["metadata"]["name"] == name]
    return manifest


def _pod(found: list[dict[str, Any]], component: str) -> dict[str, Any]:
    spec: dict[str, Any] = _deployment(found, component)["spec"]["template"]["spec"]
    return spec


def _secret(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [volume["secret"] for volume in _pod(manifests, "coordinator")["volumes"] if volume["name"] == "token"]
    return found


def _policy(found: list[dict[str, Any]], component: str) -> dict[str, Any]:
    name = f"paceline-{component}"
    (manifest,) = [m for m in found if m["kind"] == "NetworkPolicy" and m["metadata"]["name"] == name]
    return manifest


def _hook(found: list[dict[str, Any]]) -> dict[str, Any]:
    hook: dict[str, Any] = _pod(found, "worker")["containers"][0]["lifecycle"]["preStop"]["exec"]
    return hook
