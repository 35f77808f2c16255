"""What deploy/monitoring has for Prometheus and Grafana: it is valid, and names metrics and labels that are there."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession, TCPConnector
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from paceline_server import Coordinator, ServerSettings
from paceline_server._grpc import aio, grpc
from support import manifests
from support.browser import program
from support.certificates import make_folder
from support.coordinator import RawSession, run

DEPLOY = Path(__file__).parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
MANIFESTS = manifests.load(DEPLOY / "kubernetes")


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Returns the metrics of a coordinator that has TLS and a job of two workers."""
    folder = make_folder(tmp_path_factory.mktemp("monitoring") / "tls")
    trusting = ssl.create_default_context(cafile=folder.path / "ca.pem")
    credentials = grpc.ssl_channel_credentials((folder.path / "ca.pem").read_bytes())

    async def main() -> str:
        served = folder.server(mutual=False)
        coordinator = Coordinator(ServerSettings(listen="127.0.0.1:0", http="127.0.0.1:0", **served))
        address = await coordinator.start()
        try:
            async with (
                aio.secure_channel(address, credentials) as channel,
                ClientSession(connector=TCPConnector(ssl=trusting)) as client,
            ):
                sessions = await asyncio.gather(*(RawSession.register(channel, pid=pid) for pid in (1, 2)))
                for session in sessions:
                    await session.view()
                    await session.heartbeat(operation=1, sent_bytes={"shm": 1024}, checkpoint_step=1, checkpoints=1)
                await sessions[0].enter_barrier("beats are heard")
                await sessions[1].enter_barrier("beats are heard")
                await sessions[0].barrier_passed()
                async with client.get(f"{coordinator.http_url}metrics") as answer:
                    return await answer.text()
        finally:
            await coordinator.stop(grace=0.2)

    return run(main)


def expressions() -> dict[str, str]:
    """All expressions, by what they are for."""
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    found = {rule["alert"]: rule["expr"] for rule in rules}
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']}, {target['refId']}"] = target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found[variable["name"]] = variable["definition"]
    for annotation in dashboard["annotations"]["list"]:
        found[annotation["name"]] = annotation["expr"]
    return found


def series_of(metrics: str) -> dict[str, list[dict[str, str]]]:
    """Labels of all series, by name; also of metrics that have none now."""
    families: list[Metric] = list(text_string_to_metric_families(metrics))
    found: dict[str, list[dict[str, str]]] = {}
    for family in families:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        for suffix in suffixes:
            found.setdefault(family.name + suffix, [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def test_alerts_and_dashboard_use_only_exported_metrics(metrics: str) -> None:
    offered = series_of(metrics)
    wrong = []
    for place, expression in expressions().items():
        selectors = re.findall(r"\b((?:paceline|process)_\w+)(?:\{([^}]*)\})?", expression)
        assert selectors, place
        for name, inside in selectors:
            if name not in offered:
                wrong.append(f"{place}: there is no {name}")
                continue
            for label, operator, value in re.findall(r'(\w+)\s*(=~?|!=)\s*"([^"]*)"', inside):
                values = {labels.get(label) for labels in offered[name]}
                wanted = set(value.split("|")) if operator == "=~" else {value}
                if not (wanted <= values or (value == "$job" and values != {None})):
                    wrong.append(f"{place}: no series of {name} has {label}={value!r}")
    assert not wrong, "\n".join(wrong)


def test_labels_used_for_grouping_or_display_exist(metrics: str) -> None:
    labels = {label for series in series_of(metrics).values() for labels in series for label in labels}
    text = "\n".join(expressions().values()) + (MONITORING / "grafana.json").read_text()
    named = {
        word
        for group in re.findall(r"\bby \(([\w, ]+)\)|\bon \(([\w, ]+)\)", text)
        for word in re.findall(r"\w+", "".join(group))
    }
    assert named | set(re.findall(r"\{\{(\w+)\}\}", text)) <= labels


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels: list[dict[str, Any]] = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24  # Grafana's grid


@pytest.mark.needs(what="browser")
@pytest.mark.parametrize(
    "what",
    [
        "check rules alerts.yaml",
        "test rules alerts_test.yaml",
        "check config prometheus.yaml",
    ],
)
def test_promtool_accepts_the_rules_their_tests_and_the_config(what: str) -> None:
    done = subprocess.run(
        [program("promtool"), *what.split()], cwd=MONITORING, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs(what="browser")
def test_promtool_accepts_the_kubernetes_configuration(tmp_path: Path) -> None:
    """But for how it finds pods, which Debian's Prometheus does not know; its files are those of a pod."""
    config = yaml.safe_load((MONITORING / "prometheus-kubernetes.yaml").read_text())
    (scrape,) = config["scrape_configs"]
    (find,) = scrape.pop("kubernetes_sd_configs")
    (by_label,) = find["selectors"]
    (coordinator,) = [
        m for m in MANIFESTS if (m["kind"], m["metadata"]["name"]) == ("Deployment", "paceline-coordinator")
    ]
    pod = coordinator["spec"]["template"]
    assert dict(part.split("=") for part in by_label["label"].split(",")) == pod["metadata"]["labels"]
    assert scrape["relabel_configs"][0]["regex"] in [p["name"] for p in pod["spec"]["containers"][0]["ports"]]
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    words = [program("promtool"), "check", "config", "--syntax-only", str(tmp_path / "prometheus.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs(what="browser")
def test_promtool_accepts_the_metrics(metrics: str) -> None:
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=metrics, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_each_alert_has_a_test_in_which_it_fires() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((MONITORING / "alerts_test.yaml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}
    silent = {one["alertname"] for test in tests for one in test["alert_rule_test"] if not one["exp_alerts"]}
    assert {rule["alert"] for rule in rules} == fired
    assert fired - silent == {"PacelineLowGoodput"}  # its test has a job for which it is silent
