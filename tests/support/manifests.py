"""What must be true of Kubernetes manifests, checked without a cluster: their schemas, what they say of each other.

The schemas are Kubernetes' own, from the package kubernetes-validate, and strict: an unknown field is a mistake. What
refers to something else by name is followed here: selectors, ports, claims, mounts, the coordinator's address.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from paceline._base.addresses import CoordinatorAddresses
from paceline_server.storage.etcd_address import EtcdAddress

__all__ = ["DRAINED", "VERSIONS", "job_of", "load", "pods_of", "problems", "schema_problems", "template_of"]

Manifest = dict[str, Any]

VERSIONS = ("1.28", kubernetes_validate.latest_version())

_JOB_VERSIONS = ("1.31", kubernetes_validate.latest_version())
"""Pod failure policies and Jobs that change their size are stable from 1.31 on."""

_JOB_KINDS = ("Job", "JobSet", "ClusterTrainingRuntime", "TrainJob")

_TLS = ("PACELINE_TLS_CA", "PACELINE_TLS_CERT", "PACELINE_TLS_KEY")

_DRAIN_S = 30
"""Seconds that the launcher gives a worker to leave (paceline.launch._supervision.DRAIN_S)."""

_known: dict[str, list[str]] = {}
"""The schema's problems by manifest: a test that breaks one of twenty does not have the others checked anew."""

DRAINED = 130
"""The exit code of a launcher whose workers have left because of SIGINT (128 + 2)."""

_METADATA = {"name": str, "generateName": str, "labels": dict, "annotations": dict}

_JOB_SET = {
    "failurePolicy": {"maxRestarts": int},
    "network": {"enableDNSHostnames": bool},
    "replicatedJobs!": [
        {"name!": str, "replicas": int, "template!": {"metadata": _METADATA, "spec!": ...}},
    ],
}

_RESOURCES = {"requests": dict, "limits": dict}

_FIELDS: dict[tuple[Any, Any], Any] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): {
        "apiVersion": str,
        "kind": str,
        "metadata!": _METADATA,
        "spec!": _JOB_SET,
    },
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): {
        "apiVersion": str,
        "kind": str,
        "metadata!": _METADATA,
        "spec!": {"mlPolicy": {"numNodes": int}, "template!": {"metadata": _METADATA, "spec!": _JOB_SET}},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "apiVersion": str,
        "kind": str,
        "metadata!": _METADATA,
        "spec!": {
            "runtimeRef!": {"name!": str, "kind": str, "apiGroup": str},
            "trainer": {
                "image": str,
                "command": [str],
                "args": [str],
                "env": ...,
                "numNodes": int,
                "resourcesPerNode": _RESOURCES,
            },
        },
    },
}
"""The fields that our manifests use of kinds that Kubernetes' own schemas do not have: those of JobSet 0.9 and Kubeflow
Trainer 2. What `...` stands for is checked elsewhere."""


def load(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization and of those that it names, in order, as `kubectl kustomize` makes them.

    Of kustomize it knows resources, patches that are merged, each of one manifest (kustomize ends with a panic if one
    patch deletes several), and new tags and digests of images.
    """
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    found: list[Manifest] = []
    for name in kustomization["resources"]:
        path = (folder / name).resolve()
        found += load(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for patch in kustomization.get("patches", []):
        change = yaml.safe_load(patch.get("patch") or (folder / patch["path"]).read_text())
        (target,) = [manifest for manifest in found if _title(manifest) == _title(change)]
        if change.get("$patch") == "delete":
            found.remove(target)
        else:
            found[found.index(target)] = _merged(target, change)
    images = {image["name"]: image for image in kustomization.get("images", [])}
    for container in [container for manifest in found for container in _containers(manifest)]:
        name = re.split("[:@]", container["image"])[0]
        if (image := images.get(name)) is not None:
            container["image"] = f"{name}@{image['digest']}" if "digest" in image else f"{name}:{image['newTag']}"
    return found


def _merged(value: Any, change: Any) -> Any:
    """A strategic merge: fields are replaced one by one, and entries of lists are found by their name."""
    if isinstance(value, dict) and isinstance(change, dict):
        return value | {name: _merged(value.get(name), part) for name, part in change.items()}
    if isinstance(value, list) and all(isinstance(part, dict) and "name" in part for part in change):
        changes = {part["name"]: part for part in change}
        kept = [_merged(part, changes.pop(part["name"], {})) for part in value]
        return kept + list(changes.values())
    return copy.deepcopy(change)


def job_of(manifest: Manifest) -> Manifest | None:
    """The spec of the Job that a manifest is or makes; None if it is something else."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Job":
        return manifest.get("spec")
    sets = {"JobSet": spec, "ClusterTrainingRuntime": spec.get("template", {}).get("spec", {})}
    if manifest["kind"] not in sets:
        return None
    (replicated,) = sets[manifest["kind"]]["replicatedJobs"]
    job: Manifest = replicated["template"]["spec"]
    return job


def template_of(manifest: Manifest) -> Manifest | None:
    """The template of the pods that a manifest makes; None if it makes none."""
    whole = manifest["spec"] if manifest["kind"] in ("Deployment", "StatefulSet") else job_of(manifest)
    return None if whole is None else dict(whole["template"])


def pods_of(manifest: Manifest) -> int:
    """How many pods it makes."""
    spec, job = manifest["spec"], job_of(manifest)
    if job is None:
        return int(spec["replicas"])
    return int(spec["mlPolicy"]["numNodes"] if "mlPolicy" in spec else job["parallelism"])


def problems(manifests: list[Manifest]) -> list[str]:
    """Everything that is wrong, in sentences; empty if nothing is."""
    found = [text for manifest in manifests for text in schema_problems(manifest)]
    if found:  # what follows relies on the shape
        return found
    found += _names(manifests)
    for manifest in manifests:
        if template_of(manifest) is not None:
            found += _of_pods(manifest, manifests)
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            found += _of_set(manifest, manifests)
        elif job_of(manifest) is not None:
            found += _of_job(manifest)
        elif manifest["kind"] == "Service":
            found += _of_service(manifest, manifests)
        elif manifest["kind"] == "PodDisruptionBudget":
            found += _of_budget(manifest, manifests)
        elif manifest["kind"] == "NetworkPolicy":
            found += _of_policy(manifest, manifests)
    found += _ways(manifests)
    found += _tokens(manifests)
    return found


def schema_problems(manifest: Manifest) -> list[str]:
    """What a manifest says that the schema of its kind does not have, once for each problem."""
    known = _known.get(as_text := repr(manifest))
    if known is None:
        versions = _JOB_VERSIONS if manifest.get("kind") in _JOB_KINDS else VERSIONS
        known = list(dict.fromkeys(text for version in versions for text in _of_schema(manifest, version)))
        _known[as_text] = known
    return known


def _of_schema(manifest: Manifest, version: str) -> Iterator[str]:
    api = (manifest.get("apiVersion"), manifest.get("kind"))
    if api in _FIELDS:
        unknown = list(_unknown(manifest, _FIELDS[api], str(manifest["kind"])))
        yield from unknown
        job = None if unknown or api[1] == "TrainJob" else job_of(manifest)
        if job is not None:
            yield from _of_schema(
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": manifest["metadata"], "spec": job}, version
            )
        return
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


def _unknown(value: Any, fields: Any, where: str) -> Iterator[str]:
    """What is no field of a kind that is not Kubernetes' own, or is missing (a name with "!")."""
    if fields is ...:
        return
    if isinstance(fields, type):
        if not isinstance(value, fields) or isinstance(value, bool) is not (fields is bool):
            yield f"{where}: {value!r} is not of type {fields.__name__}"
    elif isinstance(fields, set):
        if value not in fields:
            yield f"{where}: {value!r} is none of {', '.join(sorted(fields))}"
    elif isinstance(fields, list):
        for number, part in enumerate(value):
            yield from _unknown(part, fields[0], f"{where}[{number}]")
    else:
        known = {name.rstrip("!"): kind for name, kind in fields.items()}
        for name in sorted(set(value) - set(known)):
            yield f"{where}: {name!r} was unexpected"
        for name in (name.rstrip("!") for name in fields if name.endswith("!")):
            if name not in value:
                yield f"{where}: {name!r} is missing"
        for name in sorted(set(value) & set(known)):
            yield from _unknown(value[name], known[name], f"{where}.{name}")


def _of_job(manifest: Manifest) -> Iterator[str]:
    """A pod that is moved, or drained by its hook, neither counts as a failure nor completes its index."""
    title, job = _title(manifest), job_of(manifest)
    assert job is not None
    if job.get("completionMode") != "Indexed":
        yield f"{title}: only the completions of an indexed Job can be changed"
    if job.get("completions") != job.get("parallelism"):
        yield f"{title}: completions and parallelism differ, so neither can be changed"
    pod = job["template"]["spec"]
    if pod.get("restartPolicy") != "Never":
        yield f"{title}: podFailurePolicy needs restartPolicy Never"
    rules = job.get("podFailurePolicy", {}).get("rules", [])
    ignored = [rule for rule in rules if rule["action"] == "Ignore"]
    moved = {"type": "DisruptionTarget", "status": "True"}
    if not any(moved in rule.get("onPodConditions", []) for rule in ignored):
        yield f"{title}: pods that are moved count as failures"
    for container in pod["containers"]:
        codes = {"containerName": container["name"], "operator": "In", "values": [DRAINED]}
        if not any(rule.get("onExitCodes") == codes for rule in ignored):
            yield f"{title}: pods that drain count as failures"


def _of_set(manifest: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    title, spec = _title(manifest), manifest["spec"]
    services = [m["metadata"]["name"] for m in manifests if m["kind"] == "Service"]
    if manifest["kind"] == "StatefulSet" and spec["serviceName"] not in services:
        yield f"{title}: there is no service {spec['serviceName']}"
    if not _selects(spec["selector"]["matchLabels"], manifest):
        yield f"{title}: its selector does not match its own pods"
    for other in _selected(spec["selector"]["matchLabels"], manifests):
        if other is not manifest:
            yield f"{title}: its selector matches the pods of {_title(other)} too"


def _of_pods(manifest: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    title, template = _title(manifest), template_of(manifest)
    assert template is not None
    pod = template["spec"]
    for constraint in pod.get("topologySpreadConstraints", []):
        if not constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items():
            yield f"{title}: spreads other pods than its own"
    claims = {m["metadata"]["name"]: m["spec"] for m in manifests if m["kind"] == "PersistentVolumeClaim"}
    volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
    volumes |= {each["metadata"]["name"]: each["spec"] for each in manifest["spec"].get("volumeClaimTemplates", [])}
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in claims:
            yield f"{title}: there is no claim {claim}"
        many = pods_of(manifest) > 1 or manifest["spec"].get("strategy", {}).get("type") == "RollingUpdate"
        if claim in claims and many and claims[claim]["accessModes"] != ["ReadWriteMany"]:
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
        if _does(container) == "run":
            yield from _of_drain(title, pod, container, "TERM" if job_of(manifest) is None else "INT")


def _of_drain(title: str, pod: Manifest, container: Manifest, signal: str) -> Iterator[str]:
    """The hook tells the launcher, and holds back the kubelet's SIGTERM, which would kill, until it must have ended."""
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    hook = re.fullmatch(rf"kill -{signal} 1 && sleep (\d+)", command[-1] if command[:-1] == ["sh", "-c"] else "")
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
    names = {port["name"] for port in container.get("ports", [])}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if kind in container and _asked(container[kind]) not in {str(port) for port in (*ports, *names)}:
            yield f"{title}: {kind} asks a port that is not open"
    if not container["image"].startswith("paceline:") and "@sha256:" not in container["image"]:
        yield f"{title}: {container['image']} may be another image tomorrow: it is of others, and named by no digest"
    if _does(container) in ("run", "coordinator"):
        yield from _of_paceline(title, container, mounts, manifests)
    if _does(container) == "etcd":
        yield from _of_etcd(title, container, mounts)


def _of_etcd(title: str, container: Manifest, mounts: Manifest) -> Iterator[str]:
    """What is wrong in the arguments of an etcd: callers and peers need certificates, and its files are on volumes."""
    options = {name: value for name, _, value in (word.partition("=") for word in container["command"][1:])}
    for prefix, side in (("", "client"), ("peer-", "peer")):
        if not options[f"--listen-{side}-urls"].startswith("https://"):
            yield f"{title}: its {side}s talk in the clear"
        if f"--{prefix}client-cert-auth" not in options:
            yield f"{title}: its {side}s need no certificate"
        for name in ("cert-file", "key-file", "trusted-ca-file"):
            path = options.get(f"--{prefix}{name}", "")
            if str(Path(path).parent) not in mounts.values():
                yield f"{title}: --{prefix}{name} is on no volume"


def _tokens(manifests: list[Manifest]) -> Iterator[str]:
    """Workers have no access to the coordinator's tokens, of which the first is an operator's."""
    secrets: dict[str, set[str]] = {"run": set(), "coordinator": set()}
    for pod in [template["spec"] for m in manifests if (template := template_of(m)) is not None]:
        kind = _does(pod["containers"][0])
        for volume in pod.get("volumes", []):
            if kind in secrets and volume["name"] == "token":
                secrets[kind].add(volume["secret"]["secretName"])
    for name in sorted(secrets["run"] & secrets["coordinator"]):
        yield f"workers read the secret {name}, which has an operator's token"


def _of_paceline(title: str, container: Manifest, mounts: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    """What is wrong in a coordinator's or a worker's arguments and variables."""
    ports = {port["containerPort"] for port in container.get("ports", [])}
    known = _addresses(manifests)
    environment = {entry["name"]: entry["value"] for entry in container.get("env", []) if "value" in entry}
    paths = [environment[name] for name in ("PACELINE_TOKEN_FILE", *_TLS) if name in environment]
    if "PACELINE_TOKEN_FILE" not in environment:
        yield f"{title}: has no token"
    if not set(_TLS) <= set(environment):
        yield f"{title}: talks in the clear"
    if _does(container) == "coordinator":
        options = dict(zip(container["args"][1::2], container["args"][2::2], strict=True))
        listening = int(options.pop("--listen").rpartition(":")[2])
        if listening not in ports:
            yield f"{title}: listens on {listening}, which is not open"
        page = options.pop("--http", ":0").rpartition(":")[2]
        if {"name": "http", "containerPort": int(page)} not in container.get("ports", []):
            yield f"{title}: serves metrics on {page}, which is no port of the name http"
        if not {"--tls-cert", "--tls-key", "--tls-ca"} <= set(options):
            yield f"{title}: talks in the clear"
        if options["--state"].startswith("etcd:"):
            etcd = EtcdAddress.parse(options.pop("--state"))
            if etcd.ca is None or etcd.cert is None:
                yield f"{title}: talks to etcd in the clear, or shows it no certificate"
            paths += [str(path) for path in (etcd.ca, etcd.cert, etcd.key) if path is not None]
            for endpoint in etcd.endpoints:
                if endpoint not in known:
                    yield f"{title}: no etcd answers at {endpoint}"
            own = options.pop("--advertise").replace("$(POD)", f"{title.split()[1].rstrip(',')}-0")
            if own not in known:
                yield f"{title}: nobody reaches it at {own}"
        paths += options.values()
    for path in paths:
        if str(Path(path).parent) not in mounts.values():
            yield f"{title}: {path} is on no volume"
    if (addresses := environment.get("PACELINE_COORDINATOR")) is not None:
        for address in map(str, CoordinatorAddresses.parse(addresses)):
            if address not in known:
                yield f"{title}: no service answers at {address}"


def _addresses(manifests: list[Manifest]) -> set[str]:
    """Where services, and the pods of a StatefulSet by their own names, answer."""
    ports = {m["metadata"]["name"]: m["spec"]["ports"] for m in manifests if m["kind"] == "Service"}
    names = [(name, name) for name in ports]
    for manifest in (m for m in manifests if m["kind"] == "StatefulSet"):
        service = manifest["spec"]["serviceName"]
        pods = [f"{manifest['metadata']['name']}-{n}.{service}" for n in range(manifest["spec"]["replicas"])]
        names += [(pod, service) for pod in pods if service in ports]
    return {f"{name}:{port['port']}" for name, service in names for port in ports[service]}


def _asked(probe: Manifest) -> str:
    """The port that a probe asks: its number or its name."""
    if "exec" in probe:
        return str(probe["exec"]["command"][-1].rpartition(":")[2])
    return str(probe["httpGet"]["port"])


def _does(container: Manifest) -> str:
    """What runs in a container: "coordinator", "run" or another command's name."""
    return str(container["args"][0] if "args" in container else container["command"][0])


def _of_service(manifest: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    title, chosen = _title(manifest), _selected(manifest["spec"]["selector"], manifests)
    if len(chosen) != 1:
        yield f"{title}: its selector matches the pods of {len(chosen)} workloads"
    for other in chosen:
        containers = _containers(other)
        names = {port["name"] for container in containers for port in container.get("ports", [])}
        for port in manifest["spec"]["ports"]:
            if port["targetPort"] not in names:
                yield f"{title}: {_title(other)} has no port {port['targetPort']}"


def _of_budget(manifest: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    title, chosen = _title(manifest), _selected(manifest["spec"]["selector"]["matchLabels"], manifests)
    if len(chosen) != 1:
        yield f"{title}: its selector matches the pods of {len(chosen)} workloads"
    for other in chosen:
        if manifest["spec"]["minAvailable"] >= pods_of(other):
            yield f"{title}: no pod of {_title(other)} could ever be moved"
        (container,) = _containers(other)
        least = {entry["name"]: entry.get("value") for entry in container["env"]}["PACELINE_MIN_WORKERS"]
        if manifest["spec"]["minAvailable"] < int(least):
            yield f"{title}: keeps fewer than the {least} workers that the job needs"


def _of_policy(manifest: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    title, chosen = _title(manifest), _selected(manifest["spec"]["podSelector"]["matchLabels"], manifests)
    if len(chosen) != 1:
        yield f"{title}: its selector matches the pods of {len(chosen)} workloads"
    containers = [container for other in chosen for container in _containers(other)]
    names = {port["name"] for container in containers for port in container.get("ports", [])}
    for rule in manifest["spec"]["ingress"]:
        for port in rule.get("ports", []):
            if port["port"] not in names:
                yield f"{title}: lets callers reach {port['port']}, which is no port of its pods"


def _ways(manifests: list[Manifest]) -> Iterator[str]:
    """What is let through is what Paceline needs: workers call the coordinator and each other, it knocks at theirs."""
    components = {_does(_containers(m)[0]): m for m in manifests if template_of(m) is not None}
    coordinator, workers = components["coordinator"], components["run"]
    ways = [
        (coordinator, "Ingress", "from", workers),
        (coordinator, "Egress", "to", workers),
        (workers, "Ingress", "from", workers),
    ]
    if pods_of(coordinator) > 1:
        ways += [(coordinator, "Ingress", "from", coordinator), (coordinator, "Egress", "to", coordinator)]
    if (etcd := components.get("etcd")) is not None:
        ways += [(coordinator, "Egress", "to", etcd), (etcd, "Ingress", "from", coordinator)]
    for other, way, end, wanted in ways:
        policies = [
            m["spec"]
            for m in manifests
            if m["kind"] == "NetworkPolicy" and _selects(m["spec"]["podSelector"]["matchLabels"], other)
        ]
        rules = [rule for policy in policies if way in policy["policyTypes"] for rule in policy.get(way.lower(), [])]
        peers = [peer["podSelector"]["matchLabels"] for rule in rules for peer in rule.get(end, [])]
        if not any(way in policy["policyTypes"] for policy in policies):
            yield f"{_title(other)}: {way} is open to everybody"
        elif not any(_selects(labels, wanted) for labels in peers):
            yield f"{_title(other)}: {way} shuts out {_title(wanted)}"


def _selected(labels: dict[str, str], manifests: list[Manifest]) -> list[Manifest]:
    return [m for m in manifests if template_of(m) is not None and _selects(labels, m)]


def _selects(labels: dict[str, str], workload: Manifest) -> bool:
    template = template_of(workload)
    return template is not None and labels.items() <= template["metadata"]["labels"].items()


def _containers(workload: Manifest) -> list[Manifest]:
    template = template_of(workload)
    return [] if template is None else list(template["spec"]["containers"])


def _title(manifest: Manifest) -> str:
    return f"{manifest.get('kind')} {manifest.get('metadata', {}).get('name')}"
