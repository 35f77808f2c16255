"""A session as far as steps need it: messages to and from the coordinator, and access to other members' state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from paceline._elastic.mates import ALONE, Alone
from paceline._elastic.offer import Content, OfferedState
from paceline._elastic.peer_calls import Holder, get_manifest, out_of_reach, take_shards, take_state
from paceline._elastic.reshard_plan import ReshardPlan
from paceline._group import Group
from paceline._links.base import Mesh, Peer
from paceline._links.grpc_mesh import GrpcMesh
from paceline._links.local import LocalMesh, next_meshes
from paceline._session.inbox import MemberInbox, ReachResult, ViewLinked
from paceline._session.member import MemberConnection
from paceline.config import Config
from paceline.errors import LinkUnavailable
from paceline_protocol import Meet, Tag
from paceline_protocol.messages import CatchUp, Dismissed, Finished, MemberList, ViewFormed


class JobLine:
    """The part of a session that the steps use."""

    def __init__(self, connection: MemberConnection, config: Config, mates: Alone = ALONE) -> None:
        self.mates = mates
        self.job = connection.job
        self.group = connection.group
        self.inbox = connection.inbox
        self.offered = OfferedState()
        self.config = config
        self._connection = connection
        self._how = config.failure_timeout, connection.credentials
        self._trying: asyncio.Task[None] | None = None  # on the loop

    @property
    def member_id(self) -> str:
        """This member's id, as others know it now."""
        return self._connection.member_id

    @property
    def min_workers(self) -> int:
        """The fewest members that the job may have."""
        return self._connection.wanted.min_workers

    def open(self) -> None:
        """Tells the coordinator that training begins."""
        self._connection.start_line(self.offered)

    def meet(self, meet: Meet) -> None:
        """Tells the coordinator that this member has stopped between steps and what state it holds."""
        self._connection.line.meet(meet)

    def go_on(self) -> None:
        """Stops repeating the last `meet`, for instance after a reconnect: this member goes on."""
        self._connection.line.go_on()

    def finish(self, step: int) -> None:
        """Tells the coordinator that all steps are done; the answer arrives in `inbox`."""
        self._connection.line.finish(self.group.generation, step)

    def move(self, mesh: Mesh) -> None:
        """Moves the group to the links of the next generation."""
        assert isinstance(mesh, GrpcMesh)
        self._connection.move(mesh)

    def word_completed(self, step: int) -> None:
        """Notes the last step that every member has entered, for the next heartbeat."""
        self._connection.line.word_completed(step)
        self.group._core.recorder.step(self.group.generation, step)

    def take(self, tag: Tag, donors: Sequence[Peer], own: Content) -> Content:
        """Fetches a state that other members hold."""
        counters = self.group._core.counters
        with counters.fetching_state():
            return self._connection.run(
                take_state(self.job, tag, donors, own, *self._how, received=counters.state_received)
            )

    def take_shards(self, tag: Tag, holders: Sequence[Holder], plan: ReshardPlan) -> None:
        """Fetches the shards that a plan needs of a state that other members hold in parts."""
        counters = self.group._core.counters
        with counters.fetching_state():
            self._connection.run(
                take_shards(self.job, tag, holders, plan, *self._how, received=counters.state_received)
            )

    def try_to_reach(self, members: Sequence[Peer]) -> None:
        """Tests whether this member and each of these can connect; ends an earlier test. `inbox` gets the result."""

        async def ask() -> None:
            if self._trying is not None:
                self._trying.cancel()  # the line's members have changed
            self._trying = asyncio.current_task()
            troubles = await out_of_reach(self.job, members, self._connection.knocker, *self._how)
            self.inbox.put(ReachResult(members, troubles))

        self._connection.begin(ask)

    def manifest_of(self, donor: Peer) -> bytes:
        """Fetches another member's manifest."""
        return self._connection.run(get_manifest(self.job, donor, *self._how))


class SoloLine(JobLine):
    """The line of a world of one: it answers every call at once, as a coordinator would."""

    def __init__(self, job: str, group: Group, config: Config, mates: Alone = ALONE) -> None:
        self.mates = mates
        self.job = job
        self.group = group
        self.inbox = MemberInbox()
        self.offered = OfferedState()
        self.config = config

    @property
    def member_id(self) -> str:
        """Empty: there are no other members."""
        return ""

    @property
    def min_workers(self) -> int:
        """One."""
        return 1

    def open(self) -> None:
        """Does nothing."""

    def meet(self, meet: Meet) -> None:
        """Lets this member go, read its checkpoint, or go on in the next generation."""
        if meet.leaving:
            self.inbox.put(Dismissed(last=True))
            return
        if meet.stored:
            assert meet.tag is not None
            self.inbox.put(CatchUp(meet.generation, meet.tag, (), None))
            return
        mesh = self.group._core.mesh
        assert isinstance(mesh, LocalMesh)
        (following,) = next_meshes([mesh])
        following.generation = max(following.generation, (meet.tag or Tag(0, 0)).generation + 1)
        view = ViewFormed(MemberList(following.generation, 1), 0, meet.tag)
        self.inbox.put(ViewLinked(view, following, self.member_id))

    def go_on(self) -> None:
        """Does nothing: no message is ever repeated."""

    def finish(self, step: int) -> None:
        """Says at once that the job is done."""
        self.inbox.put(Finished(step))

    def move(self, mesh: Mesh) -> None:
        """Moves the group."""
        self.group._core.move(mesh)

    def word_completed(self, step: int) -> None:
        """Does nothing."""

    def take(self, tag: Tag, donors: Sequence[Peer], own: Content) -> Content:
        """Always raises: no other member holds a state."""
        raise LinkUnavailable("this job has a single worker: no other member holds a state")

    def take_shards(self, tag: Tag, holders: Sequence[Holder], plan: ReshardPlan) -> None:
        """Always raises: no other member holds a state."""
        raise LinkUnavailable("this job has a single worker: no other member holds a state")
