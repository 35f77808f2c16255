"""Metrics of jobs for Prometheus, read at the moment of a scrape: a series ends with what it is about.

Values of labels are fixed, but for the names of jobs, of which at most `MOST_JOBS` are shown, the ranks of live views,
and kinds of links, of which a job has at most nine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paceline_protocol.coordinator import Session, spares
from paceline_server.dispatcher import Dispatcher
from paceline_server.keeper import Job
from paceline_server.measures import Histogram
from paceline_server.services.admin import phase_of, standing_of
from paceline_server.tally import CHANGE_REASONS, LOSSES, USES, Tally
from pacelinepb.v1.admin_pb2 import JobPhase

MOST_JOBS = 100
"""The most jobs with series of their own: each has some 60, and one for each rank. A scrape takes the coordinator's
loop some 10 microseconds for each series; others have a turn after each metric."""

_PHASES = {number: name.removeprefix("JOB_PHASE_").lower() for name, number in JobPhase.items() if number}

_STANDINGS = ("training", "waiting", "spare", "silent", "leaving")


class _Shown(NamedTuple):
    name: str
    job: Job | None
    """None if it is at rest."""
    tally: Tally


class JobCollector:
    """The collector of one scrape, with the jobs that the caller may see."""

    def __init__(self, dispatcher: Dispatcher, now: float, shows: Callable[[str], bool]) -> None:
        self._dispatcher = dispatcher
        self._now = now
        self._shows = shows

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics."""
        shown = self._jobs()
        yield from self._of_state(shown)
        yield from self._of_tallies(shown)
        yield from self._lag(shown)

    def _jobs(self) -> list[_Shown]:
        observatory, found = self._dispatcher.observatory, []
        for name in observatory.counted(self._now):
            tally = observatory.tally(self._now, name)
            if tally is not None and self._shows(name):
                found.append(_Shown(name, self._dispatcher.jobs.get(name), tally))
            if len(found) == MOST_JOBS:
                break
        return found

    def _of_state(self, shown: list[_Shown]) -> Iterator[Metric]:
        phase = GaugeMetricFamily("paceline_job_phase", "1 for the phase that the job is in.", labels=["job", "phase"])
        generation = GaugeMetricFamily("paceline_job_generation", "The job's latest generation.", labels=["job"])
        workers = GaugeMetricFamily("paceline_job_workers", "Workers by what they do.", labels=["job", "standing"])
        least = GaugeMetricFamily("paceline_job_workers_min", "The least workers to begin with.", labels=["job"])
        most = GaugeMetricFamily("paceline_job_workers_max", "The most workers.", labels=["job"])
        step = GaugeMetricFamily("paceline_job_step", "The last committed step that is known.", labels=["job"])
        stalled = GaugeMetricFamily(
            "paceline_job_stalled_seconds",
            "For how long nobody has got further while members wait for others; 0 while that is no more than usual.",
            labels=["job"],
        )
        waiting = GaugeMetricFamily(
            "paceline_job_waiting_seconds",
            "For how long workers have waited for a generation; 0 while none has to.",
            labels=["job"],
        )
        for name, job, tally in shown:
            step.add_metric([name], tally.step)
            if job is None:
                continue
            state, since = job.membership.state, job.membership.waits_since
            now_in = phase_of(state)
            for number, text in _PHASES.items():
                phase.add_metric([name, text], number == now_in)
            view = state.view
            generation.add_metric([name], state.generation if view is None else view.generation)
            for standing, count in self._standings(job).items():
                workers.add_metric([name, standing], count)
            if (concerned := state.concerned()) != []:
                least.add_metric([name], concerned[0].settings.min_workers)
                most.add_metric([name], concerned[0].settings.max_workers)
            waiting.add_metric([name], 0.0 if since is None else self._now - since)
            stall = tally.reports.stall(self._now, state)
            stalled.add_metric([name], 0.0 if stall is None else stall[0])
        yield from (phase, generation, workers, least, most, step, waiting, stalled)

    def _standings(self, job: Job) -> dict[str, int]:
        counts = dict.fromkeys(_STANDINGS, 0)
        state = job.membership.state
        spare = set(spares(state))
        for session in state.sessions.values():
            standing = standing_of(self._now, session, is_spare=session in spare)
            counts[standing if standing in counts else "waiting"] += 1
        return counts

    def _of_tallies(self, shown: list[_Shown]) -> Iterator[Metric]:
        steps = CounterMetricFamily(
            "paceline_steps", "Steps that count, and steps that were begun and undone.", labels=["job", "outcome"]
        )
        seconds = CounterMetricFamily(
            "paceline_step_seconds",
            "What the job's seconds were; goodput is the committed ones as a share of all.",
            labels=["job", "state"],
        )
        samples = CounterMetricFamily("paceline_samples", "Samples in the committed steps.", labels=["job"])
        generations = CounterMetricFamily(
            "paceline_generations", "Generations that have begun, by why.", labels=["job", "reason"]
        )
        lost = CounterMetricFamily("paceline_members_lost", "Members that were lost, by how.", labels=["job", "how"])
        sent = CounterMetricFamily(
            "paceline_sent_bytes", "Bytes that members have sent to each other.", labels=["job", "kind"]
        )
        waited = CounterMetricFamily(
            "paceline_collective_seconds",
            "Seconds that members have waited in collectives, all together.",
            labels=["job"],
        )
        fetched = CounterMetricFamily(
            "paceline_state_transfer_bytes",
            "Bytes of training state that members have fetched from each other.",
            labels=["job"],
        )
        fetching = CounterMetricFamily(
            "paceline_state_transfer_seconds",
            "Seconds that members have spent in fetching state, all together.",
            labels=["job"],
        )
        failures = CounterMetricFamily(
            "paceline_checkpoint_failures", "Checkpoints that could not be written.", labels=["job"]
        )
        last = GaugeMetricFamily(
            "paceline_checkpoint_last_step", "The step of the last complete checkpoint that is known.", labels=["job"]
        )
        keeping = [(name, tally) for name, _, tally in shown if tally.checkpoint_step or tally.checkpoint_failures]
        for name, tally in keeping:
            failures.add_metric([name], tally.checkpoint_failures)
            last.add_metric([name], tally.checkpoint_step)
        yield from (failures, last)
        operations = CounterMetricFamily(
            "paceline_operations",
            "Collectives and messages that rank 0 has begun, also in parts of the group.",
            labels=["job"],
        )
        logged = GaugeMetricFamily(
            "paceline_logged",
            "What scripts have logged last (session.log): means over the members that log the name.",
            labels=["job", "name"],
        )
        for name, _, tally in shown:
            operations.add_metric([name], tally.reports.operations)
            for what, value in tally.reports.logged(self._now).items():
                logged.add_metric([name, what], value)
            steps.add_metric([name, "committed"], tally.committed)
            steps.add_metric([name, "undone"], tally.undone)
            uses = tally.seconds(self._now)
            for use in USES:
                seconds.add_metric([name, use], uses[use])
            samples.add_metric([name], tally.samples)
            for reason in CHANGE_REASONS:
                generations.add_metric([name, reason], tally.generations[reason])
            losses = tally.losses(self._now)
            for how in LOSSES:
                lost.add_metric([name, how], losses[how])
            for kind, size in tally.sent_bytes.items():
                sent.add_metric([name, kind], size)
            waited.add_metric([name], tally.waited)
            fetched.add_metric([name], tally.state_bytes)
            fetching.add_metric([name], tally.state_time)
        yield from (steps, seconds, samples, generations, lost, sent, waited, fetched, fetching, operations, logged)
        for metric, text in (
            ("detection", "From the first sign that a member was lost to the verdict."),
            ("recovery", "From that sign to the next committed step."),
            ("join", "From the registration of a worker that joins a running job to its seat."),
        ):
            values = [(name, getattr(tally, metric)) for name, _, tally in shown]
            yield histogram_family(f"paceline_{metric}_seconds", text, values, ["job"])
        yield histogram_family(
            "paceline_checkpoint_seconds",
            "How long it took to write a checkpoint.",
            [(name, tally.checkpoint) for name, tally in keeping],
            ["job"],
        )

    def _lag(self, shown: list[_Shown]) -> Iterator[Metric]:
        lag = GaugeMetricFamily(
            "paceline_member_lag_seconds",
            "For how long others have waited for this member in a collective.",
            labels=["job", "rank"],
        )
        for name, job, _ in shown:
            state = job.membership.state if job is not None else None
            if state is None or state.live is None:
                continue
            there = (state.sessions.get(seat.member_id) for seat in state.live.seats)
            for session, seconds in lags(self._now, [session for session in there if session is not None]):
                lag.add_metric([name, str(session.rank)], seconds)
        yield lag


def lags(now: float, members: Iterable[Session]) -> list[tuple[Session, float]]:
    """Returns for how many seconds others have waited for each member inside a later operation than its last one."""
    lanes: dict[int, list[Session]] = {}
    for session in members:
        if session.rank is not None:
            lanes.setdefault(session.position, []).append(session)  # each counts its operations by itself
    return [each for lane in lanes.values() for each in _lags_in(now, lane)]


def _lags_in(now: float, members: list[Session]) -> list[tuple[Session, float]]:
    inside = [session.progress for session in members if session.progress.inside]
    ahead = max((progress.operation for progress in inside), default=0)
    since = min((progress.since for progress in inside if progress.operation == ahead), default=now)
    return [
        (session, now - since if session.progress.operation < ahead and session.heard > since else 0.0)
        for session in members
    ]


def histogram_family(name: str, text: str, values: Iterable[tuple[str, Histogram]], labels: list[str]) -> Metric:
    """Makes a metric of histograms by job; of a single one, with "" for a job, if there are no labels."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for job, histogram in values:
        total, buckets = 0, []
        for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([job] if labels else [], buckets, histogram.total)
    return family
