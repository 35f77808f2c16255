"""The shell around the jobs' memberships: it owns the clock, the streams and the jobs, and decides nothing.

Everything runs on one event loop, so nothing is locked. The dispatcher gives each event to its job's `Membership` and
performs the effects that come back, in order, without awaiting anything: pushes go to queues, writes to the storage's
thread (`keeper`). `timers` makes sure that no deadline is missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from paceline_protocol import View
from paceline_protocol.coordinator import (
    Abandonment,
    AddressRefused,
    AskDoor,
    DoorAnswered,
    Effect,
    EndSession,
    Event,
    ExitReported,
    ForgetView,
    Heard,
    JobState,
    Launches,
    Membership,
    Registered,
    RestartAsked,
    Resumed,
    Send,
    StoreEnding,
    StoreFinished,
    StoreReached,
    StoreVerdict,
    StoreView,
    StreamEnded,
    Ticked,
    Welcome,
    restore,
    was_this_member,
)
from paceline_protocol.messages import Running, ViewFormed
from paceline_protocol.translation import check_number, write_message
from paceline_server import wire
from paceline_server.errors import (
    BadRequest,
    Draining,
    LimitMet,
    NotFound,
    NotLeader,
    Refused,
    SessionEnded,
    StaleGeneration,
)
from paceline_server.keeper import Job, Keeper
from paceline_server.key_values import Answers, KeyValues, Storeroom
from paceline_server.limits import Budget
from paceline_server.observatory import Observatory
from paceline_server.pages import ViewPages
from paceline_server.probe_address import AddressProbes
from paceline_server.questions import Questions
from paceline_server.session_places import SessionPlaces
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import JobForgotten, Storage
from paceline_server.streams import SessionStream
from paceline_server.timers import Timers
from paceline_server.vitals import Vitals
from pacelinepb.v1 import session_pb2 as pb

_NOT_KNOWN = ""
"""The name under which the storage keeps facts about all unknown jobs; no job has this name."""

_CLAIMED = 1 << 40
"""A generation number that no job reaches by itself: it would need a view each millisecond for 35 years. A higher
number was shown by a member, and must not become the number of other jobs."""

_log = logging.getLogger(__name__)

_DOOR_SECRET_BYTES = 32
"""As many as a SHA-256 digest has, the least that RFC 2104 (3) recommends for a key."""

_AT_ONCE = 100
"""Jobs that are restored without a break when a coordinator starts."""

ALIVE_S = 0.3
"""Seconds between two messages to a member of a coordinator that shares its state with others."""

LONGEST_SILENCE_S = 1.0
"""Seconds of silence after which its members look for another coordinator."""

Observer = Callable[[str, str, float], None]
"""Called with (event, member id, time on the loop's clock), for measurements and for tests that wait for an event."""


class Dispatcher:
    """All jobs of a coordinator.

    `storage` is opened by `start` and closed by its creator. `epoch` is 0 for a coordinator that has its state for
    itself. `standby` makes the refusal of callers if this coordinator does not lead; None if it leads. `jobs` has the
    jobs with sessions or a line; `find` also finds jobs at rest. `start` sets `observatory`.
    """

    def __init__(
        self,
        settings: ServerSettings,
        storage: Storage,
        observer: Observer | None = None,
        *,
        epoch: int = 0,
        standby: Callable[[], NotLeader] | None = None,
    ) -> None:
        self.settings = settings
        self.epoch = epoch
        self.standby = standby
        self.jobs: dict[str, Job] = {}
        self.draining = False
        # Jobs of which only the number is left, and whether they are done; the one that ended first comes first.
        self._resting: OrderedDict[str, JobState] = OrderedDict()
        self._used_up = 0  # unknown jobs may have used the numbers up to this one (I3)
        self.storage = storage
        self._stores = Budget(settings.store_bytes)
        self._observer = observer
        self._streams: dict[str, SessionStream] = {}
        self._tokens: dict[str, bytes] = {}
        self._next_stream = 0
        self._launches = Launches()
        self._places = SessionPlaces(settings)  # of the sessions of all jobs but those that have failed
        self.vitals = Vitals()
        self.vitals.memory["store"] = self._stores
        self.vitals.places["sessions"] = self._places.budget
        self._emptied = asyncio.Event()  # set when we are stopping and no stream is left
        self._address_probes = AddressProbes(tls=settings.tls_cert is not None)
        self.questions = Questions(settings, self._push)
        self.keeper = Keeper(storage, self._apply_alone)
        self._timers: Timers | None = None
        self._speaking: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Loads the stored jobs; raises `NotLeader` if another coordinator has led meanwhile."""
        self._loop = asyncio.get_running_loop()
        stored_jobs = await self.storage.load()
        if self.epoch:
            await self.storage.confirm()  # otherwise another one may have changed the second half of what was read
        now = self._loop.time()
        wall = time.time()
        self.observatory = Observatory(wall - now, last_number=round(1000 * wall))
        self.keeper.took = self.observatory.commits.add
        self._timers = Timers(now, self.jobs, self._apply_alone)
        self._timers.stalled = self.vitals.stalled
        self._used_up = next((each.generation for each in stored_jobs if each.name == _NOT_KNOWN), 0)
        for count, stored in enumerate(each for each in stored_jobs if each.name != _NOT_KNOWN):
            if count % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)  # the storage must go on to show that this coordinator leads
            state = restore(
                now,
                stored.name,
                generation=stored.generation,
                view=stored.view,
                verdict=stored.verdict,
                endings=stored.endings,
                finished=stored.finished,
                reached=stored.reached,
            )
            values = self._values(stored.name, stored.keys, stored.answers)
            job = self._make_job(state, values, stored.door_secret)
            for member_id in stored.answers.keys() - state.sessions.keys():  # it ended as the last coordinator did
                values.forget(member_id)
                self.keeper.drop_answers(stored.name, member_id)
            self.jobs[stored.name] = job
            for member_id in state.sessions:
                self._places.take(member_id, self._places.payer_of(stored.name, None), stored.name)
            self.observatory.begin(now, state)
            if stored.view is not None:
                for position in range(stored.view.settings.replica_size):  # the members of the job have these lists
                    self._pages(job, stored.view, position)
            self._apply_alone(job, Ticked())
        self._timers.start()
        if self.epoch:
            self._speak()

    def listens_at(self, addresses: Collection[tuple[str, int]]) -> None:
        """Notes IP addresses and ports of this coordinator: no member has its door there, whatever it says."""
        self._address_probes.own.update(addresses)

    def _speak(self) -> None:
        """Tells all members that this coordinator leads: one that is frozen breaks no connection."""
        self._speaking = self._loop.call_later(ALIVE_S, self._speak)
        if not self.storage.is_sure:
            return
        alive = pb.SessionResponse(alive=pb.Alive())
        for stream in list(self._streams.values()):
            stream.push(alive)

    async def dissolve(self, patience: float) -> None:
        """Ends all sessions for good, in good order: tells the members, who need neither wait nor say goodbye.

        Members have `patience` seconds to hear of it, and answer by ending their streams. If the process ended earlier,
        the message might get lost with its connections.
        """
        self.draining = True
        for stream in self._streams.values():
            stream.push(pb.SessionResponse(left=pb.Left()))
        if self._streams:
            with contextlib.suppress(TimeoutError):  # a member is frozen; its stream is cut as in any other stop
                async with asyncio.timeout(patience):
                    await self._emptied.wait()

    def drain(self) -> None:
        """Refuses new calls and ends waiting ones; members keep their sessions for the next coordinator."""
        self.draining = True
        self.keeper.close()
        if self._timers is not None:
            self._timers.stop()
        if self._speaking is not None:
            self._speaking.cancel()
        for job in self.jobs.values():
            job.store.drain(Draining("the coordinator is stopping"))
        self._address_probes.close()
        self.questions.drain(Draining("the coordinator is stopping"))
        for stream in self._streams.values():
            stream.close(Draining("the coordinator is stopping"))

    # Jobs -------------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Returns the names of all jobs, sorted."""
        return sorted([*self.jobs, *self._resting])

    def find(self, name: str) -> Job | None:
        """Returns the job of that name. A job at rest is rebuilt; it stays only if a session is opened in it."""
        job = self.jobs.get(name)
        if job is None and (state := self._resting.get(name)) is not None:
            job = self._make_job(state, self._values(name, {}))
            job.reason = job.membership.decision.reason  # it was logged before the job came to rest
        return job

    async def forget(self, name: str) -> None:
        """Removes a job that is over, with its keys and its number. Returns when the removal is durable.

        On an OSError the removal is not stored, and the job is back when the coordinator is started again.
        """
        job = self.find(name)
        if job is None:
            raise NotFound(f"there is no job {name!r}; paceline status lists the jobs")
        state = job.membership.state
        if count := sum(session.stream is not None for session in state.sessions.values()):
            raise BadRequest(
                f"job {name!r} has {count} worker{'s' if count > 1 else ''}: to make them leave, use paceline drain "
                f"{name} --all; nothing was forgotten"
            )
        if not state.is_at_rest:
            raise BadRequest(
                f"job {name!r} may go on: some of its workers are silent, and may hold its state; if you know that "
                f"they have ended, run paceline restart {name} first; nothing was forgotten"
            )
        job.store.values.clear()
        self.jobs.pop(name, None)
        self._resting.pop(name, None)
        self.observatory.forget(name)
        await self.storage.write([JobForgotten(name)])  # after all earlier writes of the job, before all later ones

    # Sessions ---------------------------------------------------------------------------------------------------------

    def register(self, message: pb.Register, token_jobs: frozenset[str] | None = None) -> SessionStream:
        """Opens a session; `token_jobs` is None if the caller's token is good for all jobs, or without tokens."""
        self._check_running()
        versions = wire.read_versions(message)
        name = wire.read_job_name(message.job, self.settings)
        check_number(message.generation_floor, "generation_floor")
        token = secrets.token_bytes(16)
        stream = self._new_stream(name, secrets.token_hex(10))
        event = Registered(
            member_id=stream.member_id,
            token_sha256=wire.token_hash(token),
            stream=stream.number,
            process=wire.read_process(message.process, self.settings),
            address=wire.read_address(message.address, self.settings),
            settings=wire.read_settings(message.settings, self.settings),
            claimed_rank=message.rank if message.HasField("rank") else None,
            generation_floor=message.generation_floor,
            versions=versions,
            former_member_id=message.former_member_id,
            former_token_sha256=wire.token_hash(message.former_session_token),
            replica=wire.read_replica(message),
            position=message.position,
            launch=wire.read_launch(message),
        )
        job = self.find(name)
        sessions = job.membership.state.sessions if job is not None else {}
        former = sessions.get(event.former_member_id)
        if former is not None and not was_this_member(event, former):
            former = None
        payer = self._places.payer_of(name, token_jobs, former.member_id if former is not None else "")
        if former is None:  # else the new session takes its place
            self._places.check(payer, name, len(sessions))
        if name not in self.jobs:
            self._check_room()
        job = job or self._make_job(JobState(name, generation=self._used_up), self._values(name, {}))
        self._attach(job, stream, token, event, payer)
        return stream

    def resume(self, message: pb.Resume) -> SessionStream:
        """Opens a stream for a session that has lost its own."""
        self._check_running()
        versions = wire.read_versions(message)
        check_number(message.generation, "resume.generation")
        job = self.find(message.job)
        if job is None:
            stateless = "" if self.settings.state_path or self.epoch else " without a state file (--state)"
            raise SessionEnded(
                f"the coordinator does not know job {message.job!r}: it was started again{stateless}, so its state is "
                "lost"
            )
        stream = self._new_stream(message.job, message.member_id)
        digest = wire.token_hash(message.session_token)
        event = Resumed(message.member_id, digest, stream.number, message.generation, versions)
        self._attach(job, stream, message.session_token, event)
        return stream

    def stream_ended(self, stream: SessionStream) -> None:
        """Handles the end of a stream, whatever its reason."""
        now = self._loop.time()
        if self._observer is not None:
            self._observer("stream_ended", stream.member_id, now)
        if self._streams.get(stream.member_id) is stream:
            del self._streams[stream.member_id]
        if self.draining and not self._streams:
            self._emptied.set()
        job = self.jobs.get(stream.job)
        if job is not None and not job.failed and not self.draining:
            session = job.membership.state.sessions.get(stream.member_id)
            self.apply(job, StreamEnded(stream.member_id, stream.number))
            if session is not None and session.stream is None:
                gone = functools.partial(self._apply_alone, job, AddressRefused(stream.member_id))
                self._address_probes.watch(session, job.membership.state.sessions, gone)

    def report_exit(self, name: str, event: ExitReported) -> bool:
        """Handles a launcher's report that a process ended. Returns whether the process is a live member of the job."""
        job = self.find(name)
        if job is None:
            if event.launch_id:
                self._launches.over(event.launch_id)
            return False
        known = bool(job.membership.find(event.process))
        self.apply(job, event)  # also of a member that was only silent so far
        return known

    def authenticate(self, name: str, member_id: str, token: bytes) -> Job:
        """Returns the job of a live session, if the token is the session's."""
        self._check_running()
        job = self.jobs.get(name)
        session = job.membership.state.sessions.get(member_id) if job is not None else None
        if job is None or session is None:
            raise SessionEnded(f"job {name!r} has no such session: it has ended")
        _check_sound(job)
        if not secrets.compare_digest(session.token_sha256, wire.token_hash(token)):
            raise SessionEnded("the token is not that of the session")
        return job

    def page(self, name: str, generation: int, number: int, known_sha256: bytes, position: int = 0) -> bytes:
        """Returns a serialised page of a view, or the changes since the view whose hash the worker knows.

        In a job of replicas it is about the ranks with that position.
        """
        job = self.find(name)
        if job is None:
            raise NotFound(f"there is no job {name!r}")
        view = job.membership.state.view
        if view is None or view.generation != generation:
            raise StaleGeneration(f"generation {generation} of job {name!r} is not the current one")
        if position >= view.settings.replica_size:
            raise BadRequest(f"a replica of this job has {view.settings.replica_size} ranks: no position {position}")
        pages = self._pages(job, view, position)
        page = pages.page(number, known_sha256)
        if page is None:
            raise BadRequest(f"the view has {len(pages.pages)} pages; there is no page {number}")
        return page

    # Events and effects -----------------------------------------------------------------------------------------------

    def apply(self, job: Job, event: Event) -> None:
        """Gives an event to a job and performs the effects; if it raises `Refused`, nothing has changed."""
        _check_sound(job)
        effects = self._handle(job, event)
        if isinstance(event, Heard | DoorAnswered):  # the most frequent events; no deadline or decision changes
            return
        self._act(job, effects)

    def _handle(self, job: Job, event: Event) -> list[Effect]:
        now, membership = self._loop.time(), job.membership
        effects = membership.handle(now, event)
        if isinstance(event, Registered | Resumed):
            self.observatory.begin(now, membership.state)
        self.observatory.saw(now, event, effects, membership.state, membership.decision.reason)
        return effects

    def apply_of(self, stream: SessionStream, event: Event) -> None:
        """Gives an event that came on a stream to its job, if the stream still carries its session."""
        if self._streams.get(stream.member_id) is stream:
            self.apply(self.jobs[stream.job], event)

    def _apply_alone(self, job: Job, event: Event) -> None:
        """Gives a job an event that no caller waits for. A bug ends the sessions of this job, and of no other.

        A job that is listed no more hears nothing: another may have its name by now.
        """
        if job.failed or self.jobs.get(job.membership.state.name) is not job:
            return
        try:
            self.apply(job, event)
        except Exception:  # noqa: BLE001 - whatever it is, the other jobs of the same round must get their events
            name = job.membership.state.name
            _log.exception(
                "job %s: the coordinator failed at %s, and ends the job's sessions", name, type(event).__name__
            )
            self._fail(job)

    def _fail(self, job: Job) -> None:
        """Ends a job after a bug: its state may be half changed, so it decides nothing more, for newcomers either.

        The job keeps its name and its number until the coordinator starts again, from the stored state.
        """
        job.failed = True
        assert self._timers is not None
        self._timers.set(job, float("inf"))
        ended = _failed(job)
        job.store.drain(ended)
        for stream in [each for each in self._streams.values() if each.job == job.membership.state.name]:
            del self._streams[stream.member_id]
            self._tokens.pop(stream.member_id, None)
            stream.close(ended)
        self._places.free_job(job.membership.state.name)

    def _act(self, job: Job, effects: list[Effect]) -> None:
        for effect in effects:
            self._perform(job, effect)
        if job.reason != job.membership.decision.reason:
            job.reason = job.membership.decision.reason
            _log.info("job %s: %s", job.membership.state.name, job.reason)
        due = job.abandonment.due_at(self._loop.time(), job.membership.state)
        if due is not None and self._loop.time() >= due:
            self._give_up(job)
        else:
            self._arm(job, float("inf") if due is None else due)

    def _give_up(self, job: Job) -> None:
        """Restarts the job: no member of the last generation has been here for `restart_after`."""
        state = job.membership.state
        _log.warning("job %s: %s", state.name, job.abandonment.done(state))
        self.apply(job, RestartAsked())

    def _perform(self, job: Job, effect: Effect) -> None:
        match effect:
            case Send(member_id, (ViewFormed(View() as view) | Running(View() as view)) as message):
                announced = self._pages(job, view, message.position).announced
                self._push(member_id, write_message(replace(message, members=announced)))
            case Send(member_id, message):
                self._push(member_id, write_message(message))
            case Welcome(member_id, heartbeat_interval):
                registered = pb.Registered(
                    member_id=member_id,
                    session_token=self._tokens.pop(member_id),
                    heartbeat_interval=wire.to_duration(heartbeat_interval),
                    door_secret=job.door_secret,
                )
                if self.epoch:
                    registered.longest_silence.CopyFrom(wire.to_duration(LONGEST_SILENCE_S))
                self._push(member_id, pb.SessionResponse(registered=registered))
            case EndSession(member_id, refusal):
                self._end_session(job, member_id, refusal)
            case AskDoor(member_id, address):
                answered = functools.partial(self._apply_alone, job, DoorAnswered(member_id))
                self._address_probes.ask(address, answered)
            case ForgetView():
                self.keeper.keep(job, effect)
                self._renew_door_secret(job)
            case StoreView() | StoreVerdict() | StoreEnding() | StoreFinished() | StoreReached():
                self.keeper.keep(job, effect)

    def _renew_door_secret(self, job: Job) -> None:
        """Makes a new door secret because a line has ended: the old one opens no door of the next line.

        A session without a stream gets the new secret when it resumes.
        """
        job.door_secret = secrets.token_bytes(_DOOR_SECRET_BYTES)
        renewed = pb.SessionResponse(new_door_secret=pb.NewDoorSecret(door_secret=job.door_secret))
        for member_id in job.membership.state.sessions:
            if member_id not in self._tokens:  # otherwise `registered`, which comes first, has the new secret
                self._push(member_id, renewed)

    def _push(self, member_id: str, message: pb.SessionResponse) -> bool:
        stream = self._streams.get(member_id)
        if stream is not None:
            stream.push(message)
        return stream is not None

    def _end_session(self, job: Job, member_id: str, refusal: Refused | None) -> None:
        if job.store.end(member_id, refusal or SessionEnded("the member has left the job")):
            self.keeper.drop_answers(job.membership.state.name, member_id)
        self._places.free(member_id)
        self._tokens.pop(member_id, None)
        stream = self._streams.pop(member_id, None)
        if stream is None:
            return
        if refusal is None and self.epoch:
            self._loop.call_soon(self._say_left_once_stored, stream)  # after the other effects, which store the ending
        elif refusal is None:
            _say_left(stream)
        else:
            stream.close(refusal)

    def _say_left_once_stored(self, stream: SessionStream) -> None:
        """Answers a goodbye once it is stored: a member that has its answer does not say goodbye to the next leader."""

        def stored(written: asyncio.Future[None]) -> None:
            if written.cancelled() or written.exception() is not None:
                stream.close(Draining("the ending was not stored"))
            else:
                _say_left(stream)

        self.storage.write(()).add_done_callback(stored)

    def _pages(self, job: Job, view: View, position: int) -> ViewPages:
        pages = job.pages.get(position)
        if pages is None or pages.view is not view:
            pages = job.pages[position] = ViewPages.of(view, position, self.settings.page_members, pages)
        return pages

    # Streams and jobs -------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if self.draining:
            raise Draining("the coordinator is stopping")

    def _new_stream(self, job: str, member_id: str) -> SessionStream:
        self._next_stream += 1
        return SessionStream(self._next_stream, job, member_id, self.settings.max_pending_messages, self.epoch)

    def _check_room(self) -> None:
        """Refuses a new job if there are too many."""
        if len(self.jobs) >= self.settings.max_jobs:
            raise LimitMet(f"the coordinator has {self.settings.max_jobs} jobs, the most that it takes")

    def _values(self, name: str, keys: Mapping[str, bytes], answers: Answers = MappingProxyType({})) -> KeyValues:
        return KeyValues(name, self.settings, self._stores, keys, answers)

    def _make_job(self, state: JobState, values: KeyValues, door_secret: bytes = b"") -> Job:
        abandonment = Abandonment(self.settings.restart_after)
        state.launches = self._launches
        secret = door_secret or secrets.token_bytes(_DOOR_SECRET_BYTES)
        job = Job(Membership(state, self.settings), Storeroom(values), abandonment, secret)
        if state.finished is not None:  # it was said when the job ended; each late word of a worker brings the job back
            job.reason = job.membership.decision.reason
        return job

    def _attach(
        self, job: Job, stream: SessionStream, token: bytes, event: Registered | Resumed, payer: str = ""
    ) -> None:
        """Binds a stream to its session, for whose place `payer` pays if it is new, before effects are performed."""
        _check_sound(job)
        effects = self._handle(job, event)  # a refusal comes before anything is bound
        if payer:
            self._places.take(stream.member_id, payer, stream.job)
        self.jobs.setdefault(stream.job, job)
        self._resting.pop(stream.job, None)
        earlier = self._streams.get(stream.member_id)
        self._streams[stream.member_id] = stream
        self._tokens[stream.member_id] = token
        if earlier is not None:
            earlier.close(SessionEnded("the session was resumed on another stream"))
        if self._observer is not None:
            self._observer("stream_began", stream.member_id, self._loop.time())
        self._act(job, effects)

    def _arm(self, job: Job, due: float) -> None:
        """Sets the job's timer to its next deadline, or puts the job to rest if only its number is left.

        A job at rest loses its keys: no member is left to ask for them.
        """
        state = job.membership.state
        deadline = min(due, job.membership.next_deadline())
        if self.jobs.get(state.name) is job and state.is_at_rest:
            self._rest(job, state)
        if self.jobs.get(state.name) is not job:
            deadline = float("inf")  # if the job comes back, it is another object
        assert self._timers is not None
        self._timers.set(job, deadline)

    def _rest(self, job: Job, state: JobState) -> None:
        """Puts a job to rest: keeps only its number, and how its line ended."""
        del self.jobs[state.name]
        self.observatory.rest(self._loop.time(), state.name)
        had_keys = len(job.store.values) > 0
        job.store.values.clear()
        known = state.generation > self._used_up or state.finished is not None or state.reached is not None
        if not self.settings.keep_numbers or not known:
            if had_keys or state.generation:
                self.keeper.forget(state.name)
            return
        if had_keys:
            self.keeper.clear(state.name)
        self._resting[state.name] = JobState(
            state.name, generation=state.generation, finished=state.finished, reached=state.reached
        )
        if len(self._resting) > self.settings.max_resting_jobs:
            name, oldest = self._resting.popitem(last=False)
            if oldest.generation < _CLAIMED:
                self._used_up = max(self._used_up, oldest.generation)
            self.keeper.forget_but(name, _NOT_KNOWN, self._used_up)


def _say_left(stream: SessionStream) -> None:
    stream.push(pb.SessionResponse(left=pb.Left()))
    stream.close()


def _failed(job: Job) -> SessionEnded:
    return SessionEnded(
        f"the coordinator failed while it handled job {job.membership.state.name!r}, and has ended the job's sessions; "
        "the coordinator's log says why. Restart the coordinator to resume the job"
    )


def _check_sound(job: Job) -> None:
    """Checks that no bug has ended the job."""
    if job.failed:
        raise _failed(job)
