"""Checkpoints that members write together beside training: published once, whole, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unit.elastic.resharding import Trainee, form, one_process, reshard, together

from paceline import checkpoint
from paceline._base.activity import MemberCounters
from paceline._elastic import saver as saver_module
from paceline._elastic.saver import JointSaver
from paceline._group import Group
from paceline._links.fault import Suspicion
from paceline._links.local import local_meshes
from paceline.checkpoint import sharded, writing
from paceline.errors import CheckpointDamaged, CheckpointFailed, PacelineError, PeerLost, SizeMismatch
from paceline_protocol import Counters, Share, Tag
from pacelinepb.v1.errors_pb2 import ErrorReason
from support.parts import SOON, each

EXPECTED = one_process(6)


class World:
    """Members that train and save."""

    def __init__(self, name: str, size: int, directory: Path | None, every: int | None = None) -> None:
        self.members = [Trainee(name, Group(mesh, SOON)) for mesh in local_meshes(size)]
        self.savers = [JointSaver(directory, every) for _ in self.members]
        self.generation = 1
        self.steps = 0
        for member in self.members:
            member.group._core.confirm_same_state()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.begin()
            for saver in self.savers:
                saver.wait_until_copied()
            together(self.members, self.steps)
            self.steps += 1

    def begin(self) -> list[Any]:
        """A step begins, with its word; what each member's saver raised."""
        held = Tag(self.generation, self.steps)
        found = self.all_do(lambda saver, member: saver.begin(held, member.state._core, member.group))
        writing = any(saver.is_writing for saver in self.savers)
        for saver in self.savers:
            saver.heard(writing=writing)
        return found

    def write(self) -> None:
        """Until the disk has what was begun."""
        for saver in self.savers:
            thread = saver._saver._writer._thread if saver._saver is not None else None
            if thread is not None:
                thread.join(10)
            saver.heard(writing=False)

    def all_do(self, do: Callable[[JointSaver, Trainee], Any]) -> list[Any]:
        pairs = {id(m.group): (s, m) for s, m in zip(self.savers, self.members, strict=True)}
        return each([member.group for member in self.members], lambda group: do(*pairs[id(group)]))

    def close(self) -> None:
        for saver, member in zip(self.savers, self.members, strict=True):
            saver.wait()
            member.group.close(0.2)


@pytest.fixture
def world_of() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*args: Any) -> World:
        made.append(World(*args))
        return made[-1]

    yield make
    for world in made:
        world.close()


def no_error(outcomes: Sequence[Any]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


@pytest.mark.parametrize(("name", "size"), [("full", 1), ("full", 3), ("grad", 2), ("hybrid2", 2), ("hybrid2", 4)])
def test_a_published_checkpoint_resumes_in_another_world(
    world_of: Any, tmp_path: Path, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[int] = []
    real = sharded.publish
    monkeypatch.setattr(sharded, "publish", lambda *a: published.append(1) or real(*a))  # type: ignore[func-returns-value]
    world = world_of(name, size, tmp_path, 2)
    world.train(3)  # what is copied is of step 2, and step 3 changes the state behind it
    world.write()
    assert checkpoint.tags(tmp_path) == []
    world.begin()
    assert checkpoint.tags(tmp_path) == [Tag(1, 2)]
    assert published == [1], "one of them does it"
    after = world_of(name, 2, None)
    for rank, (saver, member) in enumerate(zip(after.savers, after.members, strict=True)):
        saver = JointSaver(tmp_path, None)
        plan = member.state._core.resharding(Share(rank, 2), own=False)
        member.state._core.switch(plan, saver.read(saver.latest(), plan))
    form(after.members, 2)
    together(after.members, 2)
    assert all(member.seen == EXPECTED[2] for member in after.members)


def test_only_rank_0_counts_published_checkpoints(
    world_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of("full", 2, tmp_path, 2)
    counters = [MemberCounters() for _ in world.savers]
    for saver, each_counters in zip(world.savers, counters, strict=True):
        saver._counters = each_counters
    world.train(3)
    world.write()
    assert counters[0].read({}).checkpoints == 0
    no_error(world.begin())
    counted = counters[0].read({})
    assert (counted.checkpoint_step, counted.checkpoints) == (2, 1)
    assert counted.checkpoint_time > 0.0
    no_error(world.all_do(lambda saver, member: saver.keep(Tag(1, 2), member.state._core, member.group)))
    assert counters[0].read({}) == counted, "it was there already"

    def full(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(sharded, "publish", full)
    refused = world.all_do(lambda saver, member: saver.keep(Tag(1, 3), member.state._core, member.group))
    assert all(isinstance(outcome, CheckpointFailed) for outcome in refused)
    assert (counters[0].read({}).checkpoints, counters[0].read({}).checkpoint_failures) == (1, 1)
    assert counters[1].read({}) == Counters()


def test_nothing_is_written_when_no_checkpoint_is_due(world_of: Any, tmp_path: Path) -> None:
    for directory, every in ((None, None), (tmp_path, None), (tmp_path, 5)):
        world = world_of("full", 2, directory, every)
        world.train(3)
        world.write()
        no_error(world.begin())
        assert not any(saver.is_writing for saver in world.savers)
    world = world_of("full", 2, tmp_path, 1)
    no_error(world.begin())
    assert checkpoint.tags(tmp_path) == []
    assert list(tmp_path.iterdir()) == [], "the state before the first step is nobody's work"


def test_a_slow_disk_does_not_delay_training(world_of: Any, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    go_on, real = threading.Event(), writing.write_part

    def slow(directory: Path, tag: Tag, attempt: str, number: int, *rest: Any) -> Any:
        assert number == 0 or go_on.wait(10)
        return real(directory, tag, attempt, number, *rest)

    monkeypatch.setattr(writing, "write_part", slow)
    world = world_of("full", 2, tmp_path, 1)
    world.train(4)  # rank 0 has written its part of the state of step 1 long since, and waits for nobody
    assert checkpoint.tags(tmp_path) == []
    assert caplog.text.count("no checkpoint of step 2: the previous one is still being written") == 1
    go_on.set()
    world.write()
    world.begin()
    assert checkpoint.tags(tmp_path) == [Tag(1, 1)]
    world.write()
    world.begin()
    assert checkpoint.tags(tmp_path) == [Tag(1, 1), Tag(1, 4)], "the next that was due"


def test_an_unpublished_checkpoint_of_a_failed_generation_is_dropped(world_of: Any, tmp_path: Path) -> None:
    world = world_of("full", 3, tmp_path, 2)
    world.train(3)
    world.write()
    for member in world.members:
        member.group._core.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, 2, 0, "it died"))
    assert all(isinstance(outcome, PacelineError) for outcome in world.begin())
    assert checkpoint.tags(tmp_path) == []
    survivors = world.members[:2]
    reshard(world.members, survivors)
    world.members[2].group.close(0.2)
    del world.members[2], world.savers[2]
    form(survivors, 2)
    world.generation, world.steps = 2, 3
    world.train(2)
    world.write()
    world.begin()
    assert checkpoint.tags(tmp_path) == [Tag(2, 4)]


def test_a_checkpoint_begun_before_a_new_generation_is_dropped(world_of: Any, tmp_path: Path) -> None:
    world = world_of("full", 2, tmp_path, 2)
    world.train(3)
    form(world.members, 2)
    world.generation = 2
    world.train(1)
    world.write()
    world.begin()
    assert checkpoint.tags(tmp_path) == [], "not as if these had written it"
    assert world.steps == 4
    world.write()
    world.train(1)
    assert checkpoint.tags(tmp_path) == [Tag(2, 4)]


def test_a_write_error_on_one_rank_drops_the_checkpoint(
    world_of: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    real, full = writing.write_part, [True]

    def refuse(directory: Path, tag: Tag, attempt: str, number: int, *rest: Any) -> Any:
        if full[0] and number == 1:
            raise OSError("no space")
        return real(directory, tag, attempt, number, *rest)

    monkeypatch.setattr(writing, "write_part", refuse)
    world = world_of("full", 2, tmp_path, 2)
    world.train(3)
    world.write()
    world.train(1)
    assert caplog.text.count("no space") == 2, "both say so"
    assert "rank 1 on" in caplog.text
    assert list(tmp_path.iterdir()) == []
    full[0] = False
    world.train(1)
    world.write()
    world.begin()
    assert checkpoint.tags(tmp_path) == [Tag(1, 4)]


def test_directories_that_are_not_shared_raise_checkpoint_failed(world_of: Any, tmp_path: Path) -> None:
    world = world_of("full", 2, tmp_path / "a", 1)
    world.savers[1]._directory = tmp_path / "b"
    world.train(1)
    found = world.all_do(lambda saver, member: saver.keep(Tag(1, 1), member.state._core, member.group))
    for error in found:
        assert isinstance(error, CheckpointFailed)
        assert "rank 1 on" in str(error)
        assert "does not see" in str(error)
        assert "must be on a disk that all ranks share" in str(error)


def test_keep_publishes_the_pending_checkpoint_and_the_last_state(world_of: Any, tmp_path: Path) -> None:
    world = world_of("full", 2, tmp_path, 2)
    world.train(3)
    no_error(world.all_do(lambda saver, member: saver.keep(Tag(1, 3), member.state._core, member.group)))
    assert checkpoint.tags(tmp_path) == [Tag(1, 2), Tag(1, 3)]
    no_error(world.all_do(lambda saver, member: saver.keep(None, member.state._core, member.group)))
    assert checkpoint.tags(tmp_path) == [Tag(1, 2), Tag(1, 3)], "what does not count is not kept"


def test_a_failed_generation_cannot_keep_its_state(world_of: Any, tmp_path: Path, caplog: Any) -> None:
    world = world_of("full", 2, tmp_path, None)
    world.train(1)
    world.members[0].group._core.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_LOST, 1, 0, "it died"))
    for error in world.all_do(lambda saver, member: saver.keep(Tag(1, 1), member.state._core, member.group)):
        assert isinstance(error, PeerLost)  # the next generation does it again
    no_error(world.all_do(lambda saver, member: saver.keep_last(Tag(1, 1), member.state._core, member.group)))
    assert caplog.text.count("the state of step 1 is lost") == 2
    assert checkpoint.tags(tmp_path) == []


def test_wait_removes_unpublished_files_and_ends_the_writer_thread(world_of: Any, tmp_path: Path) -> None:
    world = world_of("full", 2, tmp_path, 1)
    world.train(2)
    assert list(tmp_path.iterdir()), "it is being written"
    for saver in world.savers:
        saver.wait()
    assert list(tmp_path.iterdir()) == []
    assert not any(thread.name == "paceline-checkpoint" for thread in threading.enumerate())


def test_read_handles_damaged_missing_and_unshared_checkpoints(
    world_of: Any, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of("full", 2, tmp_path, None)
    world.train(1)
    for step in (1, 2):
        no_error(world.all_do(lambda s, m, step=step: s.keep(Tag(1, step), m.state._core, m.group)))  # type: ignore[misc]
    saver, state = JointSaver(tmp_path, None), world.members[0].state._core
    assert saver.latest() == Tag(1, 2)
    file = tmp_path / str(Tag(1, 2)) / "arrays-00000-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointDamaged):
        saver.read(Tag(1, 2), state.resharding(Share(0, 2), own=False))
    assert f"checkpoint {Tag(1, 2)} is left out" in caplog.text
    assert saver.latest() == Tag(1, 1)
    plan = state.resharding(Share(0, 2), own=False)
    assert saver.read(Tag(1, 1), plan)["step"] == state.step
    assert plan.wanted == []
    assert JointSaver(tmp_path, None).latest() == Tag(1, 2), "sizes alone do not tell"
    with pytest.raises(CheckpointDamaged, match="missing"):
        saver.read(Tag(1, 0), state.resharding(Share(0, 2), own=False))  # removed, for there are later ones
    slept: list[float] = []
    monkeypatch.setattr(saver_module, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    for directory, seconds in ((None, 0.0), (tmp_path / "elsewhere", 70.0)):
        with pytest.raises(CheckpointFailed, match="must lie on a disk that all workers share"):
            JointSaver(directory, None).read(Tag(1, 2), state.resharding(Share(0, 2), own=False))
        assert sum(slept) == pytest.approx(seconds, abs=0.1)
    away, slept[:] = JointSaver(tmp_path / "elsewhere", None), []
    for _ in range(2):
        with pytest.raises(CheckpointDamaged, match=r"which is not in .*elsewhere here yet"):
            away.read(Tag(1, 2), state.resharding(Share(0, 2), own=False), lambda: sum(slept) >= 60.0)
    with pytest.raises(CheckpointFailed):
        away.read(Tag(1, 2), state.resharding(Share(0, 2), own=False))
    assert sum(slept) == pytest.approx(70.0, abs=0.1), "since it was first found missing"
    checkpoint.save(tmp_path, {"step": 3, "parts": {}}, (2, 3))
    with pytest.raises(SizeMismatch, match="is missing"):
        saver.read(Tag(2, 3), state.resharding(Share(0, 2), own=False))
    assert JointSaver(None, None).latest() == Tag(0, 0)
