"""Checkpoints of replicas: the ranks of the lowest replica write together what they hold, while training goes on."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from paceline._base.activity import MemberCounters
from paceline._base.waits import Latch
from paceline._elastic.mates import Mates
from paceline._elastic.replica_checkpoint import MateLine, ReplicaContent, write
from paceline._elastic.saver import Saver
from paceline._elastic.state import TrainState
from paceline._group import Group
from paceline.checkpoint.folder import (
    discard,
    fingerprint,
    hidden_folder,
    new_attempt,
    open_folder,
    publish,
    read_manifest,
)
from paceline.checkpoint.keep import none_intact, remove, set_aside
from paceline.errors import CheckpointDamaged, CheckpointFailed, SizeMismatch, StepOrderError
from paceline_protocol import Tag

_log = logging.getLogger("paceline.elastic")

_KEEP = 2
"""How many checkpoints are kept."""


class _Attempt:
    """One checkpoint that is being written."""

    def __init__(self, tag: Tag, *, committed: bool = False) -> None:
        self.tag = tag
        self._committed = False
        self._decided = Latch()
        if committed:
            self.decide(committed=True)

    def decide(self, *, committed: bool) -> None:
        """Says whether the state is committed, so that it may be published; only the first word counts."""
        if not self._decided.is_set():
            self._committed = committed
            self._decided.set()

    def is_committed(self) -> bool:
        """Waits until that is known."""
        self._decided.wait()
        return self._committed


class ReplicaSaver(Saver):
    """The checkpoints of one rank of a replica.

    One is copied when a step has begun on all mates, and written by a thread of each rank of replica 0. Rank 0 of the
    replica publishes it once its state is committed, or drops it if training goes on from another state. In the round
    of each step mates learn whether one of them still writes the checkpoint before, so all begin the same ones.

    The directory must lie on a disk that all ranks share.

    Raises:
        StepOrderError: mates have other settings.
        ReplicaLost: a mate has ended.
    """

    def __init__(
        self, directory: str | os.PathLike[str] | None, every: int | None, counters: MemberCounters, mates: Mates
    ) -> None:
        super().__init__(directory, every, counters)
        mine = hashlib.sha256(repr((self.keeps, every)).encode()).digest()
        if len(set(mates.gather(mine))) > 1:
            raise StepOrderError(
                "the ranks of this replica call session.steps() with different checkpoint_dir or checkpoint_every"
            )
        self._line = MateLine(mates) if self.keeps else None
        self._due: Tag | None = None
        self._attempt: _Attempt | None = None

    def load(self, state: TrainState) -> None:
        """Loads the latest checkpoint that no mate finds damaged, if there is one; all mates call it.

        Raises:
            CheckpointDamaged: all that rank 0 of this replica sees are damaged.
            SizeMismatch: the checkpoint is of another model or state.
            UnsupportedOp: the state cannot be saved.
            ReplicaLost: a mate has ended.
        """
        if self._line is None:
            return
        content = ReplicaContent(state, self._line.position)
        while True:
            (generation, step), left_out = self._line.gather([list(self.latest()), list(self._left_out.values())])[0]
            tag = Tag(generation, step)
            if tag == Tag(0, 0) and left_out:
                raise none_intact(Path(self._directory or "."), left_out)
            if tag == Tag(0, 0):
                _log.info("found no checkpoint in %s", self._directory)
                return
            told = self._line.gather(self._try_to_load(content, tag, self._line))
            if misfits := [text for kind, text in told if kind == "misfit"]:
                raise SizeMismatch(misfits[0])
            if not (damages := [text for kind, text in told if kind == "damaged"]):
                break
            self._damaged.add(tag)
            self._leave_out(tag, CheckpointDamaged("; ".join(damages)))
        self.tag = self._last = self.loaded = tag
        self.fingerprint = fingerprint(self._path_of(tag))
        _log.info("found the checkpoint %s (step %d)", self._path_of(tag), tag.step)

    def _try_to_load(self, content: ReplicaContent, tag: Tag, line: MateLine) -> tuple[str, str]:
        """Returns what is wrong, for all mates to know; each of them verifies some of the files."""
        folder = self._path_of(tag)
        try:
            if self._is_not_there_yet(tag):
                self._wait_for(tag, lambda: False)
            files = read_manifest(folder).files
            if not files:
                raise CheckpointDamaged(f"{folder} is no checkpoint of replicas: plain workers have written it")
            for file in files[line.position :: line.size]:
                file.verify(folder)
            content.load(folder)
        except SizeMismatch as error:
            return "misfit", str(error)
        except (CheckpointDamaged, CheckpointFailed) as error:
            return "damaged", str(error)
        return "", ""

    def begin(self, held: Tag | None, state: TrainState, group: Group) -> None:
        """See `Saver.begin`; `start` copies."""
        if self._attempt is not None and self._attempt.tag != held:
            self._attempt.decide(committed=False)  # `commit` would have been called before
        due = self._every is not None and held not in (None, self._last, Tag(0, 0)) and held.step % self._every == 0
        self._due = held if due and group.rank == 0 else None

    def start(self, state: TrainState, *, writing: bool) -> None:
        """See `Saver.start`."""
        tag, self._due = self._due, None
        if tag is None or self._line is None:
            return
        if writing:
            if self._line.position == 0:
                _log.warning("no checkpoint of step %d: the previous one is still being written", tag.step)
            return
        self._complain()
        self._last, self._attempt = tag, _Attempt(tag)
        content = ReplicaContent(state, self._line.position)
        arguments = self._line, self._attempt, content.copied(), content.buffers
        self._thread = threading.Thread(target=self._write_part, args=arguments, name="paceline-checkpoint")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """See `Saver.is_writing`."""
        return self._thread is not None and self._thread.is_alive()

    def commit(self, step: int) -> None:
        """See `Saver.commit`: it may be published now."""
        if self._attempt is not None and self._attempt.tag.step <= step:
            self._attempt.decide(committed=True)

    def keep(self, held: Tag | None, state: TrainState, group: Group) -> None:
        """See `Saver.keep`; all mates call it."""
        trouble = self._keep_together(held, state, is_writer=group.rank == 0)
        refused = group.rank + 1 if trouble else 0
        refused = int(group.all_reduce(np.int64(refused), op="max", timeout=math.inf, label="kept"))
        if trouble:
            raise CheckpointFailed(f"the checkpoint {held} was not written: {trouble}")
        if refused:
            raise CheckpointFailed(
                f"{group.members[refused - 1]} could not write the checkpoint {held}; its log says why"
            )

    def keep_last(self, held: Tag | None, state: TrainState, group: Group) -> None:
        """See `Saver.keep_last`. If a replica is lost, each of the others writes, and the first one publishes."""
        if self._line is None:
            return
        mine = [list(held or ()), group.rank, group.mesh.fault.failed]
        told = self._line.gather(mine)
        tags, ranks, failed = ([one[n] for one in told] for n in range(3))
        if not held or any(tag != tags[0] for tag in tags):
            _log.error("no checkpoint of the last step: the ranks of this replica do not hold one state")
            return
        is_writer = not any(ranks) or any(failed) or len(set(ranks)) > 1
        if trouble := self._keep_together(held, state, is_writer=is_writer):
            raise CheckpointFailed(f"the checkpoint {held} was not written: {trouble}")

    def _keep_together(self, held: Tag | None, state: TrainState, *, is_writer: bool) -> str:
        """Writes the state now, if this replica is the writer; returns what went wrong, the same on all mates."""
        if self._thread is not None:
            self._thread.join()
        self._complain()
        if not is_writer or self._line is None or held is None:
            return ""
        content = ReplicaContent(state, self._line.position)
        self._write_part(self._line, _Attempt(held, committed=True), content.copied(), content.buffers)
        error, self._error = self._error, None
        troubles = self._line.gather("" if error is None else str(error))
        return next(filter(None, troubles), "")

    def wait(self) -> None:
        """See `Saver.wait`; drops a checkpoint whose state is not committed."""
        if self._attempt is not None:
            self._attempt.decide(committed=False)
        if self._thread is not None:
            self._thread.join()
        self._complain()

    def _write_part(self, line: MateLine, attempt: _Attempt, tree: dict[str, Any], buffers: set[str]) -> None:
        """Writes this rank's part of a checkpoint; on rank 0 of the replica, publishes it."""
        began = time.monotonic()
        try:
            published = self._write_together(line, attempt, tree, buffers)
        except Exception as error:  # noqa: BLE001  logged when the next one begins, or raised at the end
            self._error = error
            if line.position == 0:
                self._counters.checkpoint_failed()
        else:
            if published:
                self._counters.checkpoint_written(attempt.tag.step, time.monotonic() - began)

    def _write_together(self, line: MateLine, attempt: _Attempt, tree: dict[str, Any], buffers: set[str]) -> bool:
        directory, tag = Path(self._directory or "."), attempt.tag
        name, trouble = line.gather(self._opened(directory, tag) if line.position == 0 else None)[0]
        if trouble:
            raise CheckpointFailed(trouble)
        if not name:
            return False  # it is there already
        try:
            files = write(hidden_folder(directory, tag, name), tree, buffers, line)
            is_published = line.position == 0 and attempt.is_committed()
            if is_published:
                publish(directory, tag, name, (), name, files)
        except BaseException:
            if line.position == 0:
                discard(directory, tag, name)
            raise
        if is_published:
            remove(set_aside(directory, _KEEP, tag))
        elif line.position == 0:
            discard(directory, tag, name)
        return is_published

    def _opened(self, directory: Path, tag: Tag) -> list[str]:
        """Makes the folder of an attempt; returns its name, empty if there is nothing to write, and what went wrong."""
        try:
            if self.has(tag):
                return ["", ""]
            name = new_attempt()
            open_folder(directory, tag, name)
        except OSError as error:
            return ["", str(error)]
        return [name, ""]
