"""The manifests hold what Kubernetes' own schemas ask, and what they say of each other is true; without a cluster."""

from __future__ import annotations

import copy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
from paceline.launch import _supervision as supervision
from paceline_server.security.tokens import Grant, Role, Tokens
from support import manifests

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
MANIFESTS = manifests.load(FOLDER)
KINDS = {"": "Deployment", "job": "Job", "jobset": "JobSet", "trainer": "ClusterTrainingRuntime"}
"""The folders that users apply, and what makes the workers there."""


@pytest.mark.parametrize("folder", KINDS)
def test_the_manifests_have_no_problems(folder: str) -> None:
    found = manifests.load(FOLDER / folder)
    assert manifests.problems(found) == []
    assert [m["kind"] for m in found if manifests.template_of(m) is not None] == ["Deployment", KINDS[folder]]


def test_kustomizations_list_all_files_and_the_current_version() -> None:
    applied = {FOLDER / folder for folder in KINDS}
    for file in FOLDER.rglob("kustomization.yaml"):
        kustomization = yaml.safe_load(file.read_text())
        files = {path.name for path in file.parent.glob("*.yaml")} - {"kustomization.yaml", "trainjob.yaml"}
        assert files == {name for name in kustomization["resources"] if name.endswith(".yaml")}
        assert all((file.parent / name).exists() for name in kustomization["resources"])
        if file.parent in applied:
            tags = [(image["name"], image["newTag"]) for image in kustomization["images"]]
            assert tags == [("paceline", paceline.__version__)]
    images = {c["image"] for kind in ("coordinator", "worker") for c in _pod(MANIFESTS, kind)["containers"]}
    assert images == {f"paceline:{paceline.__version__}"}
    compose = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())
    named = {service["image"] for service in compose["services"].values()}
    assert named == {f"${{PACELINE_IMAGE:-paceline:{paceline.__version__}}}"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("folder", [*KINDS, "../kubernetes-etcd"])
def test_kubectl_kustomize_builds_the_checked_manifests(folder: str) -> None:
    made = subprocess.run(["kubectl", "kustomize", FOLDER / folder], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:500]
    found = {(m["kind"], m["metadata"]["name"]): m for m in manifests.load(FOLDER / folder)}
    assert {(m["kind"], m["metadata"]["name"]): m for m in yaml.safe_load_all(made.stdout)} == found


@pytest.mark.parametrize("text", ["deploy/kubernetes/kustomization.yaml", "docs/how-to/kubernetes.md"])
def test_documented_commands_make_a_worker_token_for_the_jobs(text: str, tmp_path: Path) -> None:
    said = (ROOT / text).read_text().splitlines()
    lines = [line.lstrip("# ") for line in said]
    shell = [line for line in lines if line.startswith(("(umask", "for job"))]
    assert len(shell) == 2
    subprocess.run(["sh", "-ec", "\n".join(shell)], cwd=tmp_path, check=True)
    created = [line.split()[-2:] for line in lines if line.startswith("kubectl create secret generic paceline-token")]
    assert created[:2] == [["paceline-tokens", "--from-file=tokens"], ["paceline-token", "--from-file=token"]]
    tokens = Tokens.parse((tmp_path / "tokens").read_text())
    first, worker = (tmp_path / "tokens").read_text().split()[0], (tmp_path / "token").read_text().strip()
    assert tokens.grant(f"Bearer {first}") == Grant(None, Role.OPERATOR)
    jobs = {_job_of(folder) for folder in KINDS if folder != "trainer"}
    assert tokens.grant(f"Bearer {worker}") == Grant(frozenset(jobs), Role.WORKER)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_the_documented_train_job_token_is_valid_for_any_job(tmp_path: Path) -> None:
    said = (ROOT / "docs/how-to/kubernetes.md").read_text()
    before, _, trainer = said.partition("## Kubeflow Trainer")
    trainer = trainer.partition("kubectl create -f deploy/kubernetes/trainer/trainjob.yaml")[0]
    shell = [line for line in (before + trainer).splitlines() if line.startswith(("(umask", "for job", "echo"))]
    subprocess.run(["sh", "-ec", "\n".join(shell)], cwd=tmp_path, check=True)
    tokens = Tokens.parse((tmp_path / "tokens").read_text())
    worker = (tmp_path / "token").read_text().strip()
    assert tokens.grant(f"Bearer {worker}") == Grant(None, Role.WORKER)
    assert "generic paceline-tokens --from-file=tokens --dry-run=client" in trainer


def _job_of(folder: str) -> str:
    """Returns the name of Paceline's job in the pods of a folder: a value, or the name of what makes the pods."""
    (container,) = _spec_of_pods(folder)["containers"]
    (job,) = [entry for entry in container["env"] if entry["name"] == "PACELINE_JOB"]
    if "value" in job:
        return str(job["value"])
    (maker,) = [m for m in manifests.load(FOLDER / folder) if manifests.job_of(m) is not None]
    return str(maker["metadata"]["name"])


def test_the_termination_grace_period_covers_the_drain_time() -> None:
    assert manifests._DRAIN_S == supervision.DRAIN_S
    held = int(_hook(MANIFESTS)["command"][-1].rpartition(" ")[2])
    assert held >= supervision.DRAIN_S + 2.0  # killed then, its processes end and its last lines come
    assert _pod(MANIFESTS, "worker")["terminationGracePeriodSeconds"] >= held + supervision.KILL_AFTER_S


def _spec_of_pods(folder: str) -> dict[str, Any]:
    (template,) = [
        template
        for template in map(manifests.template_of, manifests.load(FOLDER / folder))
        if template is not None and template["spec"]["containers"][0]["args"][0] == "run"
    ]
    return template["spec"]


@pytest.mark.parametrize("folder", ["job", "jobset", "trainer"])
def test_worker_pods_of_all_kinds_differ_only_in_their_job(folder: str) -> None:
    """As the Deployment's: what was found out about one holds for all, and is changed for all."""
    pod, known = _spec_of_pods(folder), copy.deepcopy(_pod(MANIFESTS, "worker"))
    own, base = pod["containers"][0], known["containers"][0]
    del own["name"], base["name"]
    args, lifecycle, job = own.pop("args"), own.pop("lifecycle"), own["env"].pop(1)
    assert args == [*base.pop("args"), "/checkpoints/$(PACELINE_JOB)"]
    base["lifecycle"]["preStop"]["exec"]["command"][2] = "kill -INT 1 && sleep 35"
    assert base.pop("lifecycle") == lifecycle
    assert job["name"] == base["env"].pop(1)["name"] == "PACELINE_JOB"
    label = "batch.kubernetes.io/job-name" if folder == "job" else "jobset.sigs.k8s.io/jobset-name"
    assert job["valueFrom"] == {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
    own["volumeMounts"] = [mount for mount in own["volumeMounts"] if mount["name"] != "checkpoints"]
    pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "checkpoints"]
    assert pod.pop("restartPolicy") == "Never"
    del pod["topologySpreadConstraints"]
    assert pod == known


def test_the_train_job_matches_its_runtime() -> None:
    (runtime,) = [m for m in manifests.load(FOLDER / "trainer") if m["kind"] == "ClusterTrainingRuntime"]
    job = yaml.safe_load((FOLDER / "trainer" / "trainjob.yaml").read_text())
    assert manifests.schema_problems(job) == []
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (container,) = _spec_of_pods("trainer")["containers"]
    assert container["name"] == "node", "Trainer changes the container of this name"
    assert job["spec"]["trainer"]["args"] == container["args"]
    assert job["spec"]["trainer"]["resourcesPerNode"] == container["resources"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    broken = copy.deepcopy(job)
    broken["spec"]["trainer"]["nodes"] = 4
    assert manifests.schema_problems(broken) == ["TrainJob.spec.trainer: 'nodes' was unexpected"]


def test_the_shared_memory_volume_and_memory_limit_have_set_sizes() -> None:
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
        "matches the pods of 0 workloads",
    ),
    "a port by another name": (
        lambda m: _of(m, "Service")["spec"]["ports"][0].update(targetPort="page"),
        "has no port page",
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
            command=["python3", "-m", "paceline.cli.health", "127.0.0.1:7402"]
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
    "an operator's token for workers": (
        lambda m: _pod(m, "worker")["volumes"][0]["secret"].update(secretName="paceline-tokens"),
        "workers read the secret paceline-tokens, which has an operator's token",
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
        "matches the pods of 0 workloads",
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
        lambda m: _policy(m, "coordinator")["spec"]["ingress"][0]["ports"][0].update(port="page"),
        "lets callers reach page",
    ),
    "metrics on no port": (
        lambda m: _pod(m, "coordinator")["containers"][0]["ports"].pop(),
        "serves metrics on 7401, which is no port of the name http",
    ),
    "a coordinator without metrics": (
        lambda m: _pod(m, "coordinator")["containers"][0].update(
            args=_pod(m, "coordinator")["containers"][0]["args"][:-2]
        ),
        "serves metrics on 0",
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


BROKEN_JOBS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "one number of two": (lambda job: job.update(parallelism=5), "completions and parallelism differ"),
    "no indexes": (lambda job: job.update(completionMode="NonIndexed"), "only the completions of an indexed Job"),
    "restarts that the Job does not see": (
        lambda job: job["template"]["spec"].update(restartPolicy="OnFailure"),
        "podFailurePolicy needs restartPolicy Never",
    ),
    "failures of drained nodes": (lambda job: job["podFailurePolicy"]["rules"].pop(0), "are moved count as failures"),
    "failures of drained workers": (lambda job: job["podFailurePolicy"]["rules"].pop(1), "drain count as failures"),
    "an index that is done when it drains": (
        lambda job: job["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"].__setitem__(
            2, "kill -TERM 1 && sleep 35"
        ),
        "no preStop that drains",
    ),
    "pods of others": (
        lambda job: job["template"]["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].update(
            {"app.kubernetes.io/component": "w"}
        ),
        "spreads other pods than its own",
    ),
    "a volume for one": (lambda job: None, "a volume for one needs one replica"),
    "a typing error": (lambda job: job.update(completion=4), "'completion' was unexpected"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "text"), BROKEN_JOBS.values(), ids=BROKEN_JOBS)
@pytest.mark.parametrize("folder", ["job", "jobset", "trainer"])
@pytest.mark.sampled(3)
def test_a_broken_job_manifest_is_reported(folder: str, change: Callable[[dict[str, Any]], object], text: str) -> None:
    found = manifests.load(FOLDER / folder)
    for manifest in found:
        if (job := manifests.job_of(manifest)) is not None:
            change(job)
        elif text.startswith("a volume") and manifest["metadata"]["name"] == "paceline-checkpoints":
            manifest["spec"]["accessModes"] = ["ReadWriteOnce"]
    problems = manifests.problems(found)
    assert any(text in problem for problem in problems), problems


@pytest.mark.slow
@pytest.mark.parametrize(("change", "text"), BROKEN.values(), ids=BROKEN)
@pytest.mark.sampled(3)
def test_a_broken_manifest_is_reported(change: Change, text: str) -> None:
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
