"""Metrics of the coordinator itself for Prometheus, read at the moment of a scrape. All values of labels are fixed."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paceline_server.dispatcher import Dispatcher
from paceline_server.errors import STATUS
from paceline_server.security.tls import CertificateKeeper
from paceline_server.web.metrics import histogram_family
from pacelinepb.v1.errors_pb2 import ErrorReason

_REASONS = {each.reason: ErrorReason.Name(each.reason).removeprefix("ERROR_REASON_").lower() for each in STATUS}

_PROCESS = ("process_resident_memory_bytes", "process_open_fds", "process_max_fds", "process_cpu_seconds")
"""The metrics of the process that are shown, of those that `prometheus_client` collects on Linux."""


class CoordinatorCollector:
    """The collector that `generate_latest` asks at each scrape; `started` is in seconds since 1970."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        certificates: CertificateKeeper | None,
        version: str,
        started: float,
        usable_bytes: int,
    ) -> None:
        self._dispatcher = dispatcher
        self._certificates = certificates
        self._version = version
        self._started = started
        self._usable_bytes = usable_bytes
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics."""
        yield from self._of_coordinator()
        yield from self._of_budgets()
        yield from self._of_trouble()
        yield from self._of_process()

    def _of_coordinator(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "paceline_build_info", "The version of this coordinator; always 1.", labels=["version"]
        )
        info.add_metric([self._version], 1)
        yield info
        yield GaugeMetricFamily(
            "paceline_coordinator_leader",
            "1 while this coordinator leads, 0 while it is a standby or stops.",
            value=0 if self._dispatcher.draining or self._dispatcher.standby is not None else 1,
        )
        yield GaugeMetricFamily(
            "paceline_coordinator_epoch",
            "How often a coordinator has taken over; 0 for one that shares its state with no other.",
            value=self._dispatcher.epoch,
        )
        yield GaugeMetricFamily(
            "paceline_coordinator_start_time_seconds",
            "When this coordinator started, in seconds since 1970.",
            value=self._started,
        )
        yield GaugeMetricFamily(
            "paceline_jobs", "Jobs that have workers, or a state to go on from.", value=len(self._dispatcher.jobs)
        )
        if self._certificates is not None and (until := self._certificates.held.until) is not None:
            yield GaugeMetricFamily(
                "paceline_certificate_expiry_time_seconds",
                "When the certificate that this coordinator serves expires, in seconds since 1970.",
                value=until,
            )

    def _of_budgets(self) -> Iterator[Metric]:
        vitals, jobs = self._dispatcher.vitals, len(self._dispatcher.jobs)
        memory = {kind: (budget.used, budget.total) for kind, budget in vitals.memory.items()}
        places = {kind: (budget.used, budget.total) for kind, budget in vitals.places.items()}
        places["jobs"] = jobs, self._dispatcher.settings.max_jobs
        for name, text, budgets, part in (
            ("paceline_budget_used_bytes", "Memory that callers hold, by what for.", memory, 0),
            ("paceline_budget_bytes", "Memory that callers may hold in all, by what for.", memory, 1),
            ("paceline_places_used", "Places that are taken, by of what.", places, 0),
            ("paceline_places", "Places in all, by of what.", places, 1),
        ):
            family = GaugeMetricFamily(name, text, labels=["kind"])
            for kind, numbers in budgets.items():
                family.add_metric([kind], numbers[part])
            yield family

    def _of_trouble(self) -> Iterator[Metric]:
        vitals = self._dispatcher.vitals
        refusals = CounterMetricFamily(
            "paceline_refusals", "Calls and HTTP requests that were refused, by why.", labels=["reason"]
        )
        for reason, text in _REASONS.items():
            refusals.add_metric([text], vitals.refusals[reason])
        yield refusals
        yield histogram_family(
            "paceline_loop_stall_seconds", "For how long the loop did not run.", [("", vitals.stalls)], labels=[]
        )
        yield GaugeMetricFamily(
            "paceline_loop_longest_stall_seconds",
            "The longest time for which the loop did not run since the start.",
            value=vitals.longest_stall,
        )
        yield histogram_family(
            "paceline_store_commit_seconds",
            "How long it took to store a view.",
            [("", self._dispatcher.observatory.commits)],
            labels=[],
        )
        failures = CounterMetricFamily("paceline_store_failures", "Changes of jobs that could not be stored.")
        failures.add_metric([], self._dispatcher.keeper.failures)
        yield failures

    def _of_process(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "paceline_memory_limit_bytes",
            "Memory that the process may use: its cgroup's limit, or what the machine has.",
            value=self._usable_bytes,
        )
        yield from (metric for metric in self._process.collect() if metric.name in _PROCESS)
