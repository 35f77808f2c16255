"""The driver's side: asks Ray for actors, watches them, and replaces those that die.

What to do about a worker that has ended is decided by the launcher's `Supervision`, which is pure. This is its shell on
Ray: `ray.wait` tells of ends, the coordinator is asked to drain, and `ray.kill` kills.
"""

from __future__ import annotations

import importlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from paceline import Config, PacelineError
from paceline.launch import Exit, ReplicaSupervision, RunningJob, Supervision, Terms, own_coordinator, token_for
from paceline_ray._hosted_worker import Fate, Finished, HostedWorker, JoinTerms, ReplicaRank, WorkerPlace

_log = logging.getLogger("paceline_ray")

_TURN_S = 0.2
"""Seconds between two looks at signals."""

_LOOK_S = 0.5
"""Seconds between two questions to the coordinator, which closes connections that are idle for a second."""

_ANSWER_S = 1.0
"""Seconds for an answer of the coordinator."""

_NO_ROOM_S = 10.0
"""Seconds without room for `min_workers` after which the log says so."""

_GONE_S = 120.0
"""Seconds after which members that nobody hears are declared dead, if all are gone. Ray ends the processes of a node
that is cut off after 60 s (its gcs_rpc_server_reconnect_timeout_s)."""

_GRACE_S = 5.0
"""Seconds beyond `failure_timeout` in which the peers of a failed worker end by themselves."""

_ASK_S = 5.0
"""Seconds for an answer of an actor that is alive."""


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns what a worker takes, as options of a Ray actor."""
    for name, amount in resources.items():
        if not amount >= 0:
            raise ValueError(f"resources[{name!r}] must be 0 or more, not {amount!r}")
    own = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0.0}
    options |= {own[name]: amount for name, amount in resources.items() if name in own}
    return options | {"resources": {name: amount for name, amount in resources.items() if name not in own}}


def run_workers(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    min_workers: int,
    max_workers: int,
    replica_size: int | None,
    resources: Mapping[str, float],
    restarts: int,
    job: str,
    coordinator: str | None,
    config: Config | None,
) -> dict[int, Any]:
    """See `paceline_ray.run`."""
    ray = _connected_ray()
    if not 1 <= min_workers <= max_workers:
        raise ValueError(f"min_workers must be 1 or more and max_workers no less, not {min_workers} and {max_workers}")
    if replica_size is not None and (replica_size < 1 or not any(resources.values())):
        raise ValueError(
            "replica_size must be 1 or more, and its ranks need resources, by which Ray places them; "
            f"got {replica_size} and {dict(resources)}"
        )
    if restarts < 0:
        raise ValueError(f"restarts must be 0 or more, not {restarts}")
    config = config or Config.from_environment()
    if ray.util.client.ray.is_connected() and coordinator is None:
        raise RuntimeError(
            'this process is a Ray client ("ray://"), which the nodes cannot reach: submit the script as a Ray job '
            "(ray job submit), run it on a node, or start a coordinator that the nodes reach and pass coordinator="
        )
    with ExitStack() as stack:
        token: str | None = None
        if coordinator is None:
            # Everybody is asked for a token, or for a certificate, as this address can be reached by others.
            listen = f"{ray.util.get_node_ip_address()}:0"
            served = stack.enter_context(own_coordinator(listen=listen, restart_after=_GONE_S))
            coordinator, token = served.address, served.token
        token = token or token_for(coordinator)  # perhaps of a file, which is on this machine alone
        wanted = JoinTerms(coordinator, job, min_workers, max_workers, config, token)
        look = stack.enter_context(RunningJob(coordinator, job, _ANSWER_S))
        elastic = min_workers < max_workers or restarts > 0
        terms = Terms(workers=max_workers, minimum=min_workers, elastic=elastic, restarts=restarts)
        grace = config.failure_timeout + _GRACE_S
        supervision = (
            Supervision(grace, terms) if replica_size is None else ReplicaSupervision(grace, terms, replica_size)
        )
        return _Controller(ray, (fn, args), wanted, resources, supervision, look, replica_size).run()


def results_of(finished: Sequence[Finished]) -> dict[int, Any]:
    """Returns the values of the workers that came to the end in the last generation, in the order of their ranks."""
    last = max((worker.generation for worker in finished if not worker.dismissed), default=0)
    ended = [worker for worker in finished if not worker.dismissed and worker.generation == last]
    return {worker.rank: worker.value for worker in sorted(ended, key=lambda worker: worker.rank)}


def is_over(finished: Sequence[Finished], *, has_failed: bool) -> bool:
    """True if nobody trains any more, and actors that Ray has not placed yet are not needed.

    That is so when a worker has come to the end, or when all that trained were drained. If one was drained and another
    has failed, training is not done: the actor that replaces it, or one that never had room, goes on. `has_failed` says
    that a failure is left that nobody's good end has made up for, or that an actor waits that replaces a failed one.
    """
    return any(not worker.dismissed for worker in finished) or (bool(finished) and not has_failed)


def _connected_ray() -> Any:
    """Returns the module ray, if it is connected to a cluster."""
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError:
        raise ModuleNotFoundError('paceline_ray needs Ray: pip install "ray>=2.56"', name="ray") from None
    if not ray.is_initialized():
        raise RuntimeError("this process is not connected to a Ray cluster: call ray.init() first")
    return ray


@dataclass(slots=True, eq=False)
class _Hosted:
    """An actor.

    Attributes:
        index: the worker's slot.
        waited_for: what `ray.wait` looks at: its place, then its end; None while it waits for the others to be placed.
        place: where Ray has put it; None while Ray has no room.
        trains: `train` was called, and has not ended.
        rank: its last known rank.
        replica_size: ranks of the replica that it belongs to; None if it is a worker by itself.
    """

    index: int
    actor: Any
    waited_for: Any
    place: WorkerPlace | None = None
    trains: bool = False
    rank: int | None = None
    replica_size: int | None = None

    @property
    def label(self) -> str:
        if self.replica_size is not None:
            number = f"#{self.index // self.replica_size}" if self.rank is None else self.rank // self.replica_size
            name = f"replica {number}"
        else:
            name = f"worker #{self.index}" if self.rank is None else f"rank {self.rank}"
        return name if self.place is None else f"{name} on {self.place.address}"

    def end(self, returncode: int, words: str, *, follows: bool = False) -> Exit:
        """Describes its end to `Supervision`; its process has no exit code here."""
        pid = 0 if self.place is None else self.place.pid
        position = None if self.replica_size is None else self.index % self.replica_size
        joined = self.rank is not None
        return Exit(self.label, pid, returncode, follows, self.index, joined=joined, position=position, words=words)


class _Controller:
    """Runs the workers of one call until all have ended."""

    def __init__(
        self,
        ray: Any,
        work: tuple[Callable[..., Any], tuple[Any, ...]],
        wanted: JoinTerms,
        resources: Mapping[str, float],
        supervision: Supervision,
        look: RunningJob,
        replica_size: int | None = None,
    ) -> None:
        self._ray = ray
        self._work = ray.put(work)
        self._wanted = wanted
        self._replica_size, self._size = replica_size, replica_size or 1
        self._actor_class, self._options = ray.remote(HostedWorker), actor_options(resources)
        self._bundle = {name: amount for name, amount in resources.items() if amount}
        self._bundles: dict[int, Any] = {}  # by replica: the room for all its ranks, which Ray gives together
        self._supervision = supervision
        self._look = look
        self._signals: list[signal.Signals] = []
        self._interrupted_by: signal.Signals | None = None
        self._hosted: dict[int, _Hosted] = {}  # the actors that have not ended, by slot
        self._errors: dict[int, BaseException] = {}  # the last error in each slot
        self._finished: dict[int, Finished] = {}  # the good ends, by slot
        self._gathered = False  # min_workers have been placed
        self._began = time.monotonic()
        self._next_look = self._began
        self._said_no_room = False
        self._reason = ""

    def run(self) -> dict[int, Any]:
        """Starts the workers and waits until they have ended; returns and raises as `paceline_ray.run`."""
        try:
            with self._catch_signals():
                for index in range(self._wanted.max_workers * self._size):
                    self._host(index)
                while self._unfinished():
                    self._turn()
        finally:
            for hosted in self._hosted.values():
                self._ray.kill(hosted.actor)
            for bundles in self._bundles.values():
                self._ray.util.remove_placement_group(bundles)
        if self._interrupted_by is signal.SIGINT:
            raise KeyboardInterrupt
        if self._interrupted_by is not None:
            raise SystemExit(self._supervision.exit_code)
        if (failure := self._supervision.failure) is not None:
            error = self._errors[failure.slot * self._size + (failure.position or 0)]
            error.add_note(str(failure))
            raise error
        if self._supervision.summary:
            _log.warning("%s", self._supervision.summary)
        return results_of(list(self._finished.values()))

    def _unfinished(self) -> bool:
        """True while a worker trains or a restart is pending, or one is needed for which Ray may find room."""
        if self._supervision.restarting or any(hosted.trains for hosted in self._hosted.values()):
            return True
        if self._supervision.stopping or self._supervision.interrupted:
            return False
        replaces = any(index in self._errors for index in self._hosted)
        has_failed = replaces or self._supervision.failure is not None
        return bool(self._hosted) and not is_over(list(self._finished.values()), has_failed=has_failed)

    def _host(self, index: int) -> None:
        """Asks Ray for a worker; with the first rank of a replica, for room for all its ranks."""
        replica, position = divmod(index, self._size)
        options = dict(self._options)
        if self._replica_size is not None:
            if not position:
                self._bundles[replica] = self._ray.util.placement_group([self._bundle] * self._size)
            strategies = importlib.import_module("ray.util.scheduling_strategies")
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                self._bundles[replica], placement_group_bundle_index=position
            )
        actor = self._actor_class.options(**options).remote()
        leads = self._replica_size is not None and not position
        self._hosted[index] = _Hosted(index, actor, actor.place.remote(leads), replica_size=self._replica_size)

    def _turn(self) -> None:
        """Waits for events and handles all that have occurred."""
        waited_for = {hosted.waited_for: hosted for hosted in self._hosted.values() if hosted.waited_for is not None}
        deadline, now = self._supervision.deadline, time.monotonic()
        timeout = _TURN_S if deadline is None else max(0.0, min(_TURN_S, deadline - now))
        if not waited_for:
            time.sleep(timeout)
        elif self._ray.wait(list(waited_for), num_returns=1, timeout=timeout, fetch_local=False)[0]:
            refs = list(waited_for)
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
            for ref in ready:
                self._handle(waited_for[ref])
        self._look_at_job()
        self._obey_signals()
        if isinstance(self._supervision, ReplicaSupervision):
            for hosted in map(self._hosted.get, self._supervision.mates_to_kill(time.monotonic())):
                if hosted is not None and hosted.waited_for is None:  # it was placed, and does nothing yet
                    self._end(hosted, hosted.end(1, "was killed", follows=True))
                elif hosted is not None:
                    self._ray.kill(hosted.actor)
        for index in self._supervision.restarts_due(time.monotonic()):
            self._host(index)
        self._begin_placed()

    def _handle(self, hosted: _Hosted) -> None:
        """Handles an actor's place, or its end."""
        ref, hosted.waited_for = hosted.waited_for, None
        errors = self._ray.exceptions
        try:
            value = self._ray.get(ref)
        except errors.RayTaskError as error:
            self._ended(hosted, error, self._fate_of(hosted))
        except errors.RayError as error:  # the actor is dead, perhaps with its node
            died = "died before it began" if hosted.place is None else "died"
            self._ended(hosted, error, Fate(hosted.rank, error=died))
        else:
            if isinstance(value, WorkerPlace):
                hosted.place = value
            else:
                self._finished[hosted.index] = value
                self._end(hosted, hosted.end(0, "has finished"))

    def _fate_of(self, hosted: _Hosted) -> Fate:
        """Asks an actor whose function raised; what it knows may be lost if it died right then."""
        try:
            fate: Fate = self._ray.get(hosted.actor.fate.remote(), timeout=_ASK_S)
        except self._ray.exceptions.RayError:
            return Fate(hosted.rank)
        return fate

    def _ended(self, hosted: _Hosted, error: BaseException, fate: Fate) -> None:
        """Records a worker's failure."""
        self._look_at_job(now=True)
        hosted.rank = hosted.rank if fate.rank is None else fate.rank
        self._errors[hosted.index] = error
        for index in self._slots_of(hosted.index // self._size):  # a replica ends as a whole
            self._finished.pop(index, None)
        self._end(hosted, hosted.end(1, fate.error, follows=fate.follows))

    def _end(self, hosted: _Hosted, end: Exit) -> None:
        del self._hosted[hosted.index]
        self._ray.kill(hosted.actor)  # so that others may have its room
        replica = hosted.index // self._size
        if replica in self._bundles and not any(index in self._hosted for index in self._slots_of(replica)):
            self._ray.util.remove_placement_group(self._bundles.pop(replica))
        if sentence := self._supervision.ended(end, time.monotonic()):
            _log.warning("%s", sentence)

    def _begin_placed(self) -> None:
        """Lets placed workers join: the first ones together, as soon as there are enough of them.

        A replica begins when all its ranks have been placed.
        """
        ranks = [[self._hosted.get(index) for index in self._slots_of(n)] for n in range(self._wanted.max_workers)]
        placed = [[each for each in replica if each is not None and each.place is not None] for replica in ranks]
        placed = [replica for replica in placed if len(replica) == self._size]
        now = time.monotonic()
        if len(placed) >= self._wanted.min_workers:
            self._gathered = True
        elif not self._gathered and not self._said_no_room and now >= self._began + _NO_ROOM_S:
            self._said_no_room = True
            kind = "workers" if self._replica_size is None else f"replicas of {self._size}"
            _log.warning(
                "Ray has room for %d of the %d %s that job %r needs to begin; waiting for more",
                *(len(placed), self._wanted.min_workers, kind, self._wanted.job),
            )
        if not self._gathered or self._supervision.stopping:
            return
        for replica in placed:
            for position, hosted in enumerate(replica):
                if hosted.trains:
                    continue
                assert hosted.place is not None
                assert replica[0].place is not None
                rank = ReplicaRank(position, self._size, replica[0].place) if self._replica_size is not None else None
                hosted.trains = True
                self._supervision.began(hosted.index, now)
                hosted.waited_for = hosted.actor.train.remote(self._work, self._wanted, hosted.place.address, rank)

    def _slots_of(self, replica: int) -> range:
        return range(replica * self._size, (replica + 1) * self._size)

    def _look_at_job(self, *, now: bool = False) -> None:
        """Asks the coordinator for the rank of each worker, and for what the workers wait for."""
        if not now and time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_S
        try:
            status = self._look.status()
        except PacelineError:  # nobody has joined yet, or the coordinator is away: then we know what we knew
            return
        ranks = {(member.host, member.pid): member.rank for member in status.members if member.rank is not None}
        for hosted in self._hosted.values():
            if hosted.place is not None:
                hosted.rank = ranks.get((hosted.place.host, hosted.place.pid), hosted.rank)
        if status.reason != self._reason:
            self._reason = status.reason
            _log.info("job %r: %s", self._wanted.job, self._reason)

    def _obey_signals(self) -> None:
        now = time.monotonic()
        while self._signals:
            received = self._signals.pop(0)
            self._interrupted_by = self._interrupted_by or received
            self._supervision.interrupt(received, now)
        signum = self._supervision.due(now)
        if signum == signal.SIGTERM:
            self._drain()
        elif signum == signal.SIGKILL:
            for hosted in self._hosted.values():
                self._ray.kill(hosted.actor)

    def _drain(self) -> None:
        """Tells the members to leave, and kills actors that are none."""
        _log.warning("stopping %d workers", sum(hosted.trains for hosted in self._hosted.values()))
        told: set[tuple[str, int]] = set()
        with suppress(PacelineError):  # nobody has joined, or the coordinator is away: then they are killed
            members = self._look.status().members
            self._look.drain_all()
            told = {(member.host, member.pid) for member in members}
        for hosted in list(self._hosted.values()):
            if not hosted.trains:  # it has done nothing, and its end means nothing
                del self._hosted[hosted.index]
                self._ray.kill(hosted.actor)
            elif hosted.place is None or (hosted.place.host, hosted.place.pid) not in told:
                self._ray.kill(hosted.actor)

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Notes SIGINT and SIGTERM, which would otherwise interrupt `ray.wait` anywhere; on the main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(signum: int, frame: FrameType | None) -> None:
            self._signals.append(signal.Signals(signum))

        before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
