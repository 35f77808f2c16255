"""Checkpoints, written in the background: copied when a step begins, written once the state is committed.

The lowest rank of each host writes. If hosts share the directory, only one of them does: all writers of a generation
use the same folder name, and a host that finds the folder leaves the checkpoint to the host that created it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline import checkpoint
from paceline._base.activity import MemberCounters
from paceline._elastic.parts import trains
from paceline._elastic.reshard_plan import ReshardPlan
from paceline._elastic.state import StateCore
from paceline._group import Group
from paceline._session.launcher_pipe import tell_once
from paceline.checkpoint.folder import damage_of, fingerprint
from paceline.checkpoint.keep import none_intact, save_once
from paceline.checkpoint.sharded import ShardedSaver, save_sharded
from paceline.errors import CheckpointDamaged, CheckpointFailed, PacelineError
from paceline_protocol import Tag

VISIBLE_S = 70.0
"""Seconds after which all hosts see what one of them has written: a network file system caches directories for up to a
minute (nfs(5), acdirmax)."""

_LOOK_S = 0.05
"""Seconds between two checks for a checkpoint that another host has written."""

_SHARED = "with a sharded state, checkpoint_dir must lie on a disk that all workers share"

_log = logging.getLogger("paceline.elastic")


def _elsewhere(tag: Tag, where: object) -> str:
    return f"other workers resume from the checkpoint {tag}, which is not in {where} here"


@contextlib.contextmanager
def warning_of_frozen(state: StateCore, step: int) -> Iterator[None]:
    """Logs a warning if a checkpoint that is loaded inside the block freezes or unfreezes parameters.

    That is right for a run that resumes, and mostly wrong for a second stage of fine-tuning, which begins with the
    checkpoint of the first.
    """
    before = _trained(state)
    yield
    changed = [(name, is_trained) for name, is_trained in _trained(state).items() if before.get(name) != is_trained]
    if changed:
        frozen = sum(not is_trained for _, is_trained in changed)
        trained, first = len(changed) - frozen, changed[0][0]
        tell_once(
            _log,
            f"the checkpoint of step {step} has frozen {frozen} parameter{'s'[: frozen != 1]} that the script trains, "
            f"and trains {trained} that it froze (the first: {first}). If that is not what you want, set requires_grad "
            "inside the block of the first step, or load the weights alone and use another checkpoint_dir",
        )


def _trained(state: StateCore) -> dict[str, bool]:
    """Returns for each parameter of each model whether it is trained."""
    return {
        f"{name} {path!r}": trains(parameter)
        for name, (_, part) in state.objects.items()
        for path, parameter in part.parameters().items()
    }


class Saver:
    """The checkpoints of one member.

    Args:
        every: steps between two checkpoints; None for one at the end only, or when all workers leave.

    Attributes:
        tag: tag of the state that was loaded, Tag(0, 0) for none.
        fingerprint: fingerprint of the checkpoint that was loaded: on local disks members may have different states of
            one tag, from different runs. Empty if none was loaded.
        keeps: True if there is a directory.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, every: int | None, counters: MemberCounters | None = None
    ) -> None:
        if every is not None and (every < 1 or directory is None):
            raise ValueError(f"checkpoint_every must be at least 1 step, and needs checkpoint_dir; got {every!r}")
        self.tag, self.fingerprint = Tag(0, 0), b""
        self.loaded: Tag | None = None
        self.keeps = directory is not None
        self._directory = directory
        self._every = every
        self._counters = MemberCounters() if counters is None else counters
        self._pending: tuple[Tag, Any, str] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._last = Tag(0, 0)  # the state that was copied or loaded last
        self._damaged: set[Tag] = set()  # as `read` found
        self._left_out: dict[Tag, str] = {}  # the checkpoints that were left out, and why
        self._missing: tuple[Tag, float] | None = None  # a tag that only others see, and since when

    def load(self, state: StateCore) -> None:
        """Loads the latest checkpoint that is not damaged, if there is one; CheckpointDamaged if all are damaged."""
        if self._directory is None:
            return
        found = checkpoint.load(self._directory)
        if found is None:
            _log.info("found no checkpoint in %s", self._directory)
            return
        with warning_of_frozen(state, found.tag.step):
            state.load_state_dict(found.state)
        self.tag = self._last = self.loaded = found.tag
        self.fingerprint = fingerprint(found.folder)
        _log.info("found the checkpoint %s (step %d)", found.folder, found.tag.step)

    def latest(self) -> Tag:
        """Tag of the latest checkpoint that seems complete by its file sizes and to `read`; Tag(0, 0) for none.

        Later ones are logged, once, with what is wrong with them.
        """
        if self._directory is not None:
            damaged = set(self._damaged)
            while untried := [tag for tag in checkpoint.tags(self._directory) if tag not in damaged]:
                tag = untried[-1]  # of all that are there now: others may write and remove some
                damage = damage_of(self._path_of(tag))
                if damage is None:
                    return tag
                self._leave_out(tag, damage)
                damaged.add(tag)
        return Tag(0, 0)

    def intact(self) -> Tag:
        """Returns `latest`, for a member without another state; CheckpointDamaged if there are only damaged ones."""
        found = self.latest()
        if found == Tag(0, 0) and self._left_out:
            raise none_intact(Path(self._directory or "."), self._left_out.values())
        return found

    def where(self, tag: Tag) -> str:
        """Returns the folder of the checkpoint of that tag."""
        return str(self._path_of(tag))

    def has(self, tag: Tag) -> bool:
        """True if the checkpoint of that tag is on this disk, and complete by its file sizes."""
        return self._directory is not None and damage_of(self._path_of(tag)) is None

    def read(self, tag: Tag, plan: ReshardPlan, interrupted: Callable[[], bool] = lambda: False) -> Any:
        """Fills a plan from a checkpoint that other members can read; returns the rest of the state.

        If this member does not see it, waits for it for up to `VISIBLE_S` since it first looked, unless `interrupted`.

        Raises:
            CheckpointDamaged: the checkpoint is damaged or cannot be read, was removed meanwhile, or the wait was
                interrupted; `latest` gives the one before.
            CheckpointFailed: neither it nor a later one is on this member's disk, and none appeared.
        """
        if self._directory is None:
            raise CheckpointFailed(f"{_elsewhere(tag, 'a directory that this worker was not given')}: {_SHARED}")
        if self._is_not_there_yet(tag):
            self._wait_for(tag, interrupted)
        try:
            rest = plan.load(self._path_of(tag))
        except CheckpointDamaged as damage:
            self._damaged.add(tag)
            self._leave_out(tag, damage)
            raise
        _log.info("read part %d of %d of the checkpoint %s", *plan.share, tag)
        return rest

    def _path_of(self, tag: Tag) -> Path:
        return Path(self._directory or ".") / str(tag)

    def _leave_out(self, tag: Tag, damage: CheckpointDamaged) -> None:
        if self._left_out.get(tag) != str(damage):
            self._left_out[tag] = str(damage)
            _log.error("checkpoint %s is left out: %s", tag, damage)

    def _is_not_there_yet(self, tag: Tag) -> bool:
        """True if it is not complete here and may still appear: there is no later one, and the system reads what is."""
        damage = damage_of(self._path_of(tag))
        cause = None if damage is None else damage.__cause__
        refused = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
        return damage is not None and not refused and self.latest() <= tag

    def _wait_for(self, tag: Tag, interrupted: Callable[[], bool]) -> None:
        """Waits for a checkpoint that other members resume from and that is not visible here."""
        text = _elsewhere(tag, self._directory)
        if self._missing is None or self._missing[0] != tag:
            self._missing = tag, time.monotonic()
            _log.warning("%s; waiting up to %g s, since a network file system may show it late", text, VISIBLE_S)
        while self._is_not_there_yet(tag):
            if time.monotonic() - self._missing[1] >= VISIBLE_S:
                raise CheckpointFailed(f"{text}: {_SHARED}")
            if interrupted():
                raise CheckpointDamaged(f"{text} yet")
            time.sleep(_LOOK_S)

    def begin(self, held: Tag | None, state: StateCore, group: Group) -> None:
        """Copies the state when a step begins, if a checkpoint is due."""
        self.drop_others(held)
        if self._every is None or held is None or held.step % self._every or held in (self._last, Tag(0, 0)):
            return
        if _is_lowest(group):
            self._pending = held, state.state_dict(), _attempt(group)
            self._last = held

    def drop_others(self, held: Tag | None) -> None:
        """Drops the copy of a step that was not committed, if training goes on from another state."""
        if self._pending is not None and self._pending[0] != held:
            self._pending = None

    def start(self, held: Tag | None, state: StateCore, group: Group, *, writing: bool) -> None:
        """Starts a checkpoint that mates write together, if one is due, once the step has begun on all of them.

        `writing` says whether a mate still writes the one before.
        """

    def wait_until_copied(self) -> None:
        """Waits, before the state changes, until the copy for a checkpoint is complete."""

    @property
    def is_writing(self) -> bool:
        """True while this member writes its part of a checkpoint that others wait for."""
        return False

    def heard(self, *, writing: bool) -> None:
        """Learns from the word of the last step whether any member is still writing."""

    def commit(self, step: int) -> None:
        """Starts to write the copy of a step, because the step is committed."""
        if self._pending is None or self._pending[0].step > step:
            return
        pending, self._pending = self._pending, None
        if self._thread is not None and self._thread.is_alive():
            _log.warning("no checkpoint of step %d: the previous one is still being written", pending[0].step)
            return
        self._complain()
        thread = threading.Thread(target=self._write, args=pending, name="paceline-checkpoint")
        thread.start()
        self._thread = thread

    def keep_last(self, held: Tag | None, state: StateCore, group: Group) -> None:
        """Saves like `keep` when all members leave, with no other try: if one is lost, each of the others writes."""
        if not group._core.mesh.fault.failed:
            try:
                self.keep(held, state, group)
            except CheckpointFailed:
                raise
            except PacelineError as error:
                _log.warning("a member was lost while the last checkpoint was written: %s", error)
            else:
                return
        if self._directory is not None and held is not None:
            self._write_now(held, state, "")
            self._check()

    def keep(self, held: Tag | None, state: StateCore, group: Group) -> None:
        """Writes the last state. A collective: when it returns, all writers have finished.

        The wait for them ends only if one of them dies, because a big state on a slow disk may take long.

        Raises:
            CheckpointFailed: a disk refused the write, here or at another member.
        """
        if self._directory is not None and held is not None and _is_lowest(group):
            self._write_now(held, state, _attempt(group))
        else:
            self._complain()  # this member may have written an earlier one; another member writes this one
        refused = group.rank + 1 if self._error is not None else 0
        refused = int(group.all_reduce(np.int64(refused), op="max", timeout=math.inf, label="kept"))
        self._check()
        if refused:
            raise CheckpointFailed(
                f"{group.members[refused - 1]} could not write the checkpoint {held}; its log says why"
            )

    def _write_now(self, tag: Tag, state: StateCore, attempt: str) -> None:
        if self._thread is not None:
            self._thread.join()
        self._complain()
        self._write(tag, state.state_dict(), attempt)
        if self._error is not None:
            error = CheckpointFailed(f"the checkpoint {tag} was not written: {self._error}")
            error.__cause__ = self._error
            self._error = error

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is complete."""
        if self._thread is not None:
            self._thread.join()
        self._check()

    def _write(self, tag: Tag, saved: Any, attempt: str) -> None:
        assert self._directory is not None
        began = time.monotonic()
        try:
            if attempt:
                written = save_once(self._directory, saved, tag, attempt)
            else:
                written = not self.has(tag)
                checkpoint.save(self._directory, saved, tag)
        except Exception as error:  # noqa: BLE001  raised on the training thread, at the next checkpoint
            self._error = error
            self._counters.checkpoint_failed()
        else:
            if written:
                self._counters.checkpoint_written(tag.step, time.monotonic() - began)

    def _complain(self) -> None:
        """Logs the error of the last write: a full disk does not end training, and the next checkpoint is tried."""
        error, self._error = self._error, None
        if error is not None:
            _log.error("a checkpoint could not be written: %s", error)

    def _check(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _is_lowest(group: Group) -> bool:
    me = group.members[group.rank]
    return min(member.rank for member in group.members if member.host == me.host) == me.rank


def _attempt(group: Group) -> str:
    """Returns the folder name that all writers of this generation use; empty if there is only one writer."""
    if len({member.host for member in group.members}) == 1:
        return ""
    return hashlib.sha256(f"{group.generation} {group.members[0].member_id}".encode()).hexdigest()[:16]


class JointSaver(Saver):
    """Writes the checkpoints of a sharded state: the members of a generation write each one together.

    A checkpoint is begun when a step begins, copied before that step changes anything, and written while training goes
    on. It is published when a later step begins, once all members know from a step word that none is writing any more;
    by then the state is committed. A checkpoint that is not published when its generation ends is dropped. All
    decisions follow from the step's number and the words, so that all members decide alike; rank 0 says which
    checkpoints exist already. The directory must lie on a disk that all members share.
    """

    _saver: ShardedSaver | None = None
    """The writer of this generation; None until its first checkpoint."""
    _generation = 0
    """The generation of `_saver`."""
    _begun = False
    """True while a checkpoint is being written."""
    _written = False
    """True once all members have written it, as the last step word says."""
    _written_since: tuple[Tag, float] | None = None
    """The checkpoint that rank 0 counts, and when its write began; None elsewhere, and if it was there already."""

    def begin(self, held: Tag | None, state: StateCore, group: Group) -> None:
        """See `Saver.begin`; a collective."""
        if self._generation != group.generation:
            self.wait_until_copied()
            self._saver, self._begun = None, False
        try:
            if self._saver is not None and self._begun and self._written:
                self._begun = False
                with self._counting():
                    self._saver.finish()
            if self._directory is None or held is None or not self._is_due(held):
                return
            if self._begun:
                if group.rank == 0:
                    _log.warning("no checkpoint of step %d: the previous one is still being written", held.step)
                return
            self._saver = self._saver or ShardedSaver(self._directory, group)
            self._generation = group.generation
            self._write_begins(held, group)
            with self._counting(complete=False):
                self._saver.begin(state.content(), held)
            self._begun, self._written = True, False
        except CheckpointFailed as error:  # all members see it; the next checkpoint is tried all the same
            _log.error("%s", error)

    def wait_until_copied(self) -> None:
        """See `Saver.wait_until_copied`."""
        if self._saver is not None:
            self._saver.wait_until_copied()

    @property
    def is_writing(self) -> bool:
        """See `Saver.is_writing`."""
        return self._saver is not None and self._saver.is_writing

    def heard(self, *, writing: bool) -> None:
        """See `Saver.heard`."""
        self._written = not writing

    def commit(self, step: int) -> None:
        """See `Saver.commit`: `begin` publishes what is committed."""

    def keep_last(self, held: Tag | None, state: StateCore, group: Group) -> None:
        """See `Saver.keep_last`. If a member is lost, so is its shard, and the log says so."""
        try:
            self.keep(held, state, group)
        except CheckpointFailed:
            raise
        except PacelineError as error:
            _log.error(
                "the members can no longer write a checkpoint together, and the state of step %d is lost: %s",
                state.step if held is None else held.step,
                error,
            )

    def keep(self, held: Tag | None, state: StateCore, group: Group) -> None:
        """See `Saver.keep`; a collective."""
        if self._directory is None or held is None:
            return
        group._core.mesh.fault.check()
        if self._saver is not None and self._begun and self._generation == group.generation:
            self._begun = False
            with self._counting():
                self._saver.finish()
        self._write_begins(held, group)
        with self._counting():
            save_sharded(self._directory, state.content(), held, group)

    def wait(self) -> None:
        """See `Saver.wait`; drops a checkpoint that was begun."""
        if self._saver is not None:
            self._saver.abandon()
        super().wait()

    def _write_begins(self, held: Tag, group: Group) -> None:
        there = group.rank != 0
        with contextlib.suppress(OSError):  # the write reports it, to all members
            there = there or self.has(held)
        self._written_since = None if there else (held, time.monotonic())

    @contextlib.contextmanager
    def _counting(self, *, complete: bool = True) -> Iterator[None]:
        """Counts, at rank 0, the checkpoint that the block completes, or that fails in it."""
        try:
            yield
        except CheckpointFailed:
            if self._written_since is not None:
                self._counters.checkpoint_failed()
            raise
        if complete and self._written_since is not None:
            tag, began = self._written_since
            self._counters.checkpoint_written(tag.step, time.monotonic() - began)

    def _is_due(self, held: Tag) -> bool:
        return self._every is not None and held.step > 0 and held.step % self._every == 0
