"""The manifests of two coordinators on etcd: their schemas, and what they say of each other; without a cluster."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import paceline
from paceline._base.addresses import CoordinatorAddresses
from paceline_server.storage.etcd_address import EtcdAddress
from support import manifests

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "kubernetes-etcd"
MANIFESTS = manifests.load(FOLDER)


def _named(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (manifest,) = [m for m in found if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return manifest


def _container(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (container,) = _named(found, kind, name)["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_the_manifests_have_no_problems() -> None:
    assert manifests.problems(MANIFESTS) == []


def test_coordinators_and_workers_have_the_same_image() -> None:
    kinds = (("StatefulSet", "paceline-coordinator"), ("Deployment", "paceline-worker"))
    images = {_container(MANIFESTS, *each)["image"] for each in kinds}
    assert images == {f"paceline:{paceline.__version__}"}
    compose = yaml.safe_load((DEPLOY / "compose.etcd.yaml").read_text())["services"]
    assert compose["etcd"]["image"].startswith("${ETCD_IMAGE:-quay.io/coreos/etcd:v")
    image = _container(MANIFESTS, *ETCD)["image"]
    assert image == "quay.io/coreos/etcd@sha256:THE-DIGEST", "no cluster takes that for a digest"
    for file in ("kustomization.yaml", "../compose.etcd.yaml"):
        assert "imagetools inspect quay.io/coreos/etcd:v" in (FOLDER / file).read_text()


def test_the_kustomization_lists_all_files() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    files = {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}
    assert files == {
        *kustomization["resources"],
        *(each["path"] for each in kustomization["patches"] if "path" in each),
    } - {"../kubernetes"}


def test_workers_use_the_names_that_coordinators_advertise() -> None:
    stateful = _named(MANIFESTS, "StatefulSet", "paceline-coordinator")
    arguments = _container(MANIFESTS, "StatefulSet", "paceline-coordinator")["args"]
    advertised = arguments[arguments.index("--advertise") + 1]
    pods = [f"{stateful['metadata']['name']}-{n}" for n in range(stateful["spec"]["replicas"])]
    variables = {each["name"]: each for each in _container(MANIFESTS, "Deployment", "paceline-worker")["env"]}
    known = CoordinatorAddresses.parse(variables["PACELINE_COORDINATOR"]["value"])
    assert [str(each) for each in known] == [advertised.replace("$(POD)", pod) for pod in pods]
    assert variables["PACELINE_JOB"]["value"] == "digits", "the patch changes one variable"


Change = Callable[[list[dict[str, Any]]], object]
COORDINATOR, ETCD = ("StatefulSet", "paceline-coordinator"), ("StatefulSet", "paceline-etcd")

BROKEN: dict[str, tuple[Change, str]] = {
    "a typing error": (lambda m: _named(m, *ETCD)["spec"].update(replcas=3), "'replcas' was unexpected"),
    "an etcd elsewhere": (
        lambda m: _named(m, "Service", "paceline-etcd")["metadata"].update(name="other"),
        "no etcd answers at paceline-etcd:2379",
    ),
    "a set without its service": (
        lambda m: _named(m, *COORDINATOR)["spec"].update(serviceName="other"),
        "there is no service other",
    ),
    "one coordinator of two": (
        lambda m: _named(m, *COORDINATOR)["spec"].update(replicas=1),
        "no service answers at paceline-coordinator-1.paceline-coordinators:7400",
    ),
    "a name that is in no DNS": (
        lambda m: _container(m, *COORDINATOR)["args"].__setitem__(4, "$(POD):7400"),
        "nobody reaches it at paceline-coordinator-0:7400",
    ),
    "a probe of another port": (
        lambda m: _container(m, *ETCD)["readinessProbe"]["httpGet"].update(port="peer"),
        "readinessProbe asks a port that is not open",
    ),
    "an etcd that keeps nothing": (
        lambda m: _named(m, *ETCD)["spec"].pop("volumeClaimTemplates"),
        "mounts data, which is no volume",
    ),
    "coordinators that talk to etcd in the clear": (
        lambda m: _container(m, *COORDINATOR)["args"].__setitem__(6, "etcd://paceline-etcd:2379/paceline"),
        "talks to etcd in the clear",
    ),
    "an etcd in the clear": (
        lambda m: _container(m, *ETCD)["command"].__setitem__(2, "--listen-client-urls=http://0.0.0.0:2379"),
        "its clients talk in the clear",
    ),
    "an etcd that asks for no certificate": (
        lambda m: _container(m, *ETCD)["command"].remove("--client-cert-auth"),
        "its clients need no certificate",
    ),
    "peers that ask for no certificate": (
        lambda m: _container(m, *ETCD)["command"].remove("--peer-client-cert-auth"),
        "its peers need no certificate",
    ),
    "a key of etcd on no volume": (
        lambda m: _container(m, *ETCD)["command"].remove("--key-file=/run/secrets/etcd/server.key"),
        "--key-file is on no volume",
    ),
    "an image by a tag": (
        lambda m: _named(m, *ETCD)["spec"]["template"]["spec"]["containers"][0].update(image="quay.io/coreos/etcd:v3"),
        "named by no digest",
    ),
    "coordinators that do not reach each other": (
        lambda m: _named(m, "NetworkPolicy", "paceline-coordinators")["spec"]["egress"].pop(0),
        "Egress shuts out StatefulSet paceline-coordinator",
    ),
    "an etcd for everybody": (
        lambda m: m.remove(_named(m, "NetworkPolicy", "paceline-etcd")),
        "Ingress is open to everybody",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("change", "text"), BROKEN.values(), ids=BROKEN)
@pytest.mark.sampled(3)
def test_a_broken_manifest_is_reported(change: Change, text: str) -> None:
    broken = copy.deepcopy(MANIFESTS)
    change(broken)
    found = manifests.problems(broken)
    assert any(text in problem for problem in found), found


def test_compose_workers_reach_both_coordinators_but_not_etcd() -> None:
    services = yaml.safe_load((DEPLOY / "compose.etcd.yaml").read_text())["services"]
    names = CoordinatorAddresses.parse(services["worker"]["environment"]["PACELINE_COORDINATOR"])
    assert [each.host for each in names] == [services[each]["hostname"] for each in ("coordinator", "coordinator-b")]
    state = EtcdAddress.parse(services["coordinator"]["command"][-1])
    assert state.endpoints == ("etcd:2379",)
    assert services["etcd"]["networks"] == ["state"]
    assert "networks" not in services["worker"]
