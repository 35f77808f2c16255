"""Checkpoints of a state that is spread: the members of a generation write them together, each what it holds.

A checkpoint is begun when a step begins, copied before that step changes anything, and written while others go on. It
is published when a later step begins, once all members know from a step's word that none is writing any more: then the
state is committed. What a generation has not published when it ends comes to nothing. All decisions follow from the
step's number and the words, so that all members come to the same ones; what is written already, rank 0 says.
"""

from __future__ import annotations

import logging

from paceline.checkpoint.sharded_saving import ShardedSaver, save_sharded
from paceline.elastic.saver import Saver
from paceline.elastic.state import TrainState
from paceline.errors import CheckpointFailed, PacelineError
from paceline.group import Group
from paceline_protocol import Tag

__all__ = ["SpreadSaver"]

_log = logging.getLogger("paceline.elastic")


class SpreadSaver(Saver):
    """As `Saver`. The directory must lie on a disk that all members share."""

    _saver: ShardedSaver | None = None
    """Of this generation, from its first checkpoint on."""
    _generation = 0
    """In which that was made."""
    _begun = False
    """One is being written."""
    _written = False
    """By all members: each has heard so in a word."""

    def begin(self, held: Tag | None, state: TrainState, group: Group) -> None:
        """See `Saver.begin`; a collective.

        Raises:
            PacelineError: the generation has failed.
        """
        if self._generation != group.generation:
            self.settle()
            self._saver, self._begun = None, False
        try:
            if self._saver is not None and self._begun and self._written:
                self._begun = False
                self._saver.finish()
            if self._directory is None or held is None or not self._is_due(held):
                return
            if self._begun:
                if group.rank == 0:
                    _log.warning("no checkpoint of step %d: the one before is still being written", held.step)
                return
            self._saver = self._saver or ShardedSaver(self._directory, group)
            self._generation = group.generation
            self._saver.begin(state.content(), held)
            self._begun, self._written = True, False
        except CheckpointFailed as error:  # at all members alike; the next one is tried all the same
            _log.error("%s", error)

    def settle(self) -> None:
        """See `Saver.settle`."""
        if self._saver is not None:
            self._saver.settle()

    @property
    def is_writing(self) -> bool:
        """See `Saver.is_writing`."""
        return self._saver is not None and self._saver.is_writing

    def heard(self, *, writing: bool) -> None:
        """See `Saver.heard`."""
        self._written = not writing

    def commit(self, step: int) -> None:
        """See `Saver.commit`: `begin` publishes what is committed."""

    def keep_last(self, held: Tag | None, state: TrainState, group: Group) -> None:
        """See `Saver.keep_last`: if a member is lost, so is its part, and the log says so.

        Raises:
            CheckpointFailed: the disk refused.
        """
        try:
            self.keep(held, state, group)
        except CheckpointFailed:
            raise
        except PacelineError as error:
            _log.error(
                "the members cannot write a checkpoint together any more, and the state of step %d is lost: %s",
                state.step if held is None else held.step,
                error,
            )

    def keep(self, held: Tag | None, state: TrainState, group: Group) -> None:
        """See `Saver.keep`; a collective.

        Raises:
            CheckpointFailed: the disk refused.
            PacelineError: the generation has failed.
        """
        if self._directory is None or held is None:
            return
        group.mesh.fault.check()
        if self._saver is not None and self._begun and self._generation == group.generation:
            self._begun = False
            self._saver.finish()
        save_sharded(self._directory, state.content(), held, group)

    def wait(self) -> None:
        """See `Saver.wait`: what was begun comes to nothing."""
        if self._saver is not None:
            self._saver.abandon()
        super().wait()

    def _is_due(self, held: Tag) -> bool:
        return self._every is not None and held.step > 0 and held.step % self._every == 0
