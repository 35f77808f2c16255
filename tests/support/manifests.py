"""What must be true of Kubernetes manifests, checked without a cluster: their schemas, what they say of each other.

The schemas are Kubernetes' own, from the package kubernetes-validate, and strict: an unknown field is a mistake. What
refers to something else by name is followed here: selectors, ports, claims, mounts, the coordinator's address.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

__all__ = ["VERSIONS", "load", "problems"]

Manifest = dict[str, Any]

VERSIONS = ("1.28", kubernetes_validate.latest_version())

_TLS = ("PACELINE_TLS_CA", "PACELINE_TLS_CERT", "PACELINE_TLS_KEY")

_DRAIN_S = 30
"""What the launcher gives a worker to leave (paceline.cli.launcher.supervision.DRAIN_S)."""


def load(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization, in order."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return [part for name in kustomization["resources"] for part in yaml.safe_load_all((folder / name).read_text())]


def problems(manifests: list[Manifest]) -> list[str]:
    """Everything that is wrong, in sentences; empty if nothing is."""
    found = [text for manifest in manifests for version in VERSIONS for text in _of_schema(manifest, version)]
    if found:  # what follows relies on the shape
        return found
    found += _names(manifests)
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            found += _of_deployment(manifest, manifests)
        elif manifest["kind"] == "Service":
            found += _of_service(manifest, manifests)
        elif manifest["kind"] == "PodDisruptionBudget":
            found += _of_budget(manifest, manifests)
        elif manifest["kind"] == "NetworkPolicy":
            found += _of_policy(manifest, manifests)
    found += _ways(manifests)
    return found


def _of_schema(manifest: Manifest, version: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        yield f"{_title(manifest)}, Kubernetes {version}: there is no such kind in {manifest.get('apiVersion')}"
    except kubernetes_validate.ValidationError as error:
        yield f"{_title(manifest)}, Kubernetes {version}: {str(error).splitlines()[0]}"


def _names(manifests: list[Manifest]) -> Iterator[str]:
    titles = [_title(manifest) for manifest in manifests]
    for title in sorted({title for title in titles if titles.count(title) > 1}):
        yield f"{title} is there twice"


def _of_deployment(manifest: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    title, spec = _title(manifest), manifest["spec"]
    pod = spec["template"]["spec"]
    if not _selects(spec["selector"]["matchLabels"], manifest):
        yield f"{title}: its selector does not match its own pods"
    for other in manifests:
        if other is not manifest and other["kind"] == "Deployment" and _selects(spec["selector"]["matchLabels"], other):
            yield f"{title}: its selector matches the pods of {_title(other)} too"
    claims = {m["metadata"]["name"] for m in manifests if m["kind"] == "PersistentVolumeClaim"}
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in claims:
            yield f"{title}: there is no claim {claim}"
        if claim is not None and (spec["replicas"] != 1 or spec["strategy"]["type"] != "Recreate"):
            yield f"{title}: a volume for one needs one replica and Recreate"
        if "secret" in volume and volume["secret"].get("defaultMode", 0o644) & 0o007:
            yield f"{title}: everybody may read the secret {volume['name']}"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"{title}: volume {volume['name']} may fill the node"
    if pod.get("securityContext", {}).get("runAsNonRoot") is not True:
        yield f"{title}: may run as root"
    if pod.get("enableServiceLinks") is not False:
        yield f"{title}: variables of services mix with PACELINE_*"
    for container in pod["containers"]:
        yield from _of_container(f"{title}, {container['name']}", container, volumes, manifests)
        if container["args"][0] == "run":
            yield from _of_drain(title, pod, container)


def _of_drain(title: str, pod: Manifest, container: Manifest) -> Iterator[str]:
    """The hook tells the launcher, and holds back the kubelet's SIGTERM, which would kill, until it must have ended."""
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    hook = re.fullmatch(r"kill -TERM 1 && sleep (\d+)", command[-1] if command[:-1] == ["sh", "-c"] else "")
    if hook is None:
        yield f"{title}: no preStop that drains"
        return
    held = int(hook[1])
    if held <= _DRAIN_S or held >= pod.get("terminationGracePeriodSeconds", 30):
        yield f"{title}: no time to leave in good order"


def _of_container(title: str, container: Manifest, volumes: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
    for name in sorted(set(mounts) - set(volumes)):
        yield f"{title}: mounts {name}, which is no volume"
    for name in sorted(set(volumes) - set(mounts)):
        yield f"{title}: does not mount {name}"
    for kind in ("requests", "limits"):
        if set(container.get("resources", {}).get(kind, {})) != {"cpu", "memory"}:
            yield f"{title}: no {kind} of cpu and memory"
    security = container.get("securityContext", {})
    if security.get("readOnlyRootFilesystem") is not True or security.get("allowPrivilegeEscalation") is not False:
        yield f"{title}: may change its own files, or become root"
    ports = {port["containerPort"] for port in container.get("ports", [])}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if kind in container and int(container[kind]["exec"]["command"][-1].rpartition(":")[2]) not in ports:
            yield f"{title}: {kind} asks a port that is not open"
    environment = {entry["name"]: entry["value"] for entry in container.get("env", [])}
    paths = [environment[name] for name in ("PACELINE_TOKEN_FILE", *_TLS) if name in environment]
    if "PACELINE_TOKEN_FILE" not in environment:
        yield f"{title}: has no token"
    if not set(_TLS) <= set(environment):
        yield f"{title}: talks in the clear"
    if container["args"][0] == "coordinator":
        options = dict(zip(container["args"][1::2], container["args"][2::2], strict=True))
        listening = int(options.pop("--listen").rpartition(":")[2])
        if listening not in ports:
            yield f"{title}: listens on {listening}, which is not open"
        if not {"--tls-cert", "--tls-key", "--tls-ca"} <= set(options):
            yield f"{title}: talks in the clear"
        paths += options.values()
    for path in paths:
        if str(Path(path).parent) not in mounts.values():
            yield f"{title}: {path} is on no volume"
    if (address := environment.get("PACELINE_COORDINATOR")) is not None:
        services = [m for m in manifests if m["kind"] == "Service"]
        known = {f"{m['metadata']['name']}:{port['port']}" for m in services for port in m["spec"]["ports"]}
        if address not in known:
            yield f"{title}: no service answers at {address}"


def _of_service(manifest: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    title, chosen = _title(manifest), _selected(manifest["spec"]["selector"], manifests)
    if len(chosen) != 1:
        yield f"{title}: its selector matches the pods of {len(chosen)} deployments"
    for other in chosen:
        containers = other["spec"]["template"]["spec"]["containers"]
        names = {port["name"] for container in containers for port in container.get("ports", [])}
        for port in manifest["spec"]["ports"]:
            if port["targetPort"] not in names:
                yield f"{title}: {_title(other)} has no port {port['targetPort']}"


def _of_budget(manifest: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    title, chosen = _title(manifest), _selected(manifest["spec"]["selector"]["matchLabels"], manifests)
    if len(chosen) != 1:
        yield f"{title}: its selector matches the pods of {len(chosen)} deployments"
    for other in chosen:
        if manifest["spec"]["minAvailable"] >= other["spec"]["replicas"]:
            yield f"{title}: no pod of {_title(other)} could ever be moved"
        (container,) = other["spec"]["template"]["spec"]["containers"]
        least = {entry["name"]: entry["value"] for entry in container["env"]}["PACELINE_MIN_WORKERS"]
        if manifest["spec"]["minAvailable"] < int(least):
            yield f"{title}: keeps fewer than the {least} workers that the job needs"


def _of_policy(manifest: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    title, chosen = _title(manifest), _selected(manifest["spec"]["podSelector"]["matchLabels"], manifests)
    if len(chosen) != 1:
        yield f"{title}: its selector matches the pods of {len(chosen)} deployments"
    containers = [container for other in chosen for container in other["spec"]["template"]["spec"]["containers"]]
    names = {port["name"] for container in containers for port in container.get("ports", [])}
    for rule in manifest["spec"]["ingress"]:
        for port in rule.get("ports", []):
            if port["port"] not in names:
                yield f"{title}: lets callers reach {port['port']}, which is no port of its pods"


def _ways(manifests: list[Manifest]) -> Iterator[str]:
    """What is let through is what Paceline needs: workers call the coordinator and each other, it knocks at theirs."""
    components = {
        m["spec"]["template"]["spec"]["containers"][0]["args"][0]: m for m in manifests if m["kind"] == "Deployment"
    }
    coordinator, workers = components["coordinator"], components["run"]
    for other, way, end, wanted in (
        (coordinator, "Ingress", "from", workers),
        (coordinator, "Egress", "to", workers),
        (workers, "Ingress", "from", workers),
    ):
        policies = [
            m["spec"]
            for m in manifests
            if m["kind"] == "NetworkPolicy" and _selects(m["spec"]["podSelector"]["matchLabels"], other)
        ]
        rules = [rule for policy in policies if way in policy["policyTypes"] for rule in policy.get(way.lower(), [])]
        peers = [peer["podSelector"]["matchLabels"] for rule in rules for peer in rule[end]]
        if not any(way in policy["policyTypes"] for policy in policies):
            yield f"{_title(other)}: {way} is open to everybody"
        elif not any(_selects(labels, wanted) for labels in peers):
            yield f"{_title(other)}: {way} shuts out {_title(wanted)}"


def _selected(labels: dict[str, str], manifests: list[Manifest]) -> list[Manifest]:
    return [m for m in manifests if m["kind"] == "Deployment" and _selects(labels, m)]


def _selects(labels: dict[str, str], deployment: Manifest) -> bool:
    return labels.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def _title(manifest: Manifest) -> str:
    return f"{manifest.get('kind')} {manifest.get('metadata', {}).get('name')}"
