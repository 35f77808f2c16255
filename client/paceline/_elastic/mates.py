"""The ranks of one replica, as this rank sees them (decision 30): what they exchange among themselves, and their end.

They use a Gloo group of their own, so their words never mix with the collectives of the user's model.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline._elastic.rounds import Point, Rounds
from paceline.errors import PacelineError, ReplicaLost, UnsupportedOp
from paceline_protocol import StepFlag
from pacelinepb import install_command

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("paceline.elastic")

_NO_FLAGS = StepFlag(0)

_PATIENCE = timedelta(hours=1)
"""Longest wait for a mate. The coordinator notices dead and silent ranks long before, and Gloo a broken connection."""

_LOOK = timedelta(seconds=1)
"""After an error in a block: how long to look whether a mate has ended, which breaks the connection at once."""

_GRACE_S = 5.0
"""Seconds that a script has to end after a rank of its replica was lost."""


class Alone:
    """A member without mates, whose rounds all pass at once.

    Attributes:
        position: its position in its replica.
        size: number of ranks of the replica.
        id: names this run of the replica; empty for a member without mates.
    """

    position, size, id = 0, 1, ""

    def enter(self, generation: int) -> None:
        """Enters a generation that has a base; leaves the one before."""

    def go(self, point: Point, flags: StepFlag = _NO_FLAGS) -> StepFlag | None:
        """Waits until all mates come to the same point; returns the flags of all, None if one of them has stopped.

        Raises:
            StepOrderError: the scripts of mates are at different points.
        """
        return flags

    def leave(self) -> None:
        """Leaves the generation, if this has not been said; mates that wait in it stop."""

    def cast_out(self) -> None:
        """Leaves whatever generation mates are in: the replica has no seat, or this rank a new session."""

    def closed(self) -> None:
        """Leaves the generation together with all mates, after a round in which they agreed."""

    def joint(self, digest: bytes) -> bytes:
        """Returns the digest of all mates' digests; all mates call it at the same point."""
        return digest

    def loss(self, error: BaseException) -> ReplicaLost | None:
        """Returns the loss of a mate if that explains an error in a block."""
        return None

    def refuse(self, what: str) -> None:
        """Raises UnsupportedOp for what replicas cannot do yet."""

    def end(self, error: PacelineError) -> None:
        """Ends this process soon, because its replica has lost a rank."""


ALONE = Alone()


class Mates(Alone):
    """The ranks of a replica; one that joined with a process group may have no others."""

    def __init__(self, replica: ProcessGroup, *, patience: timedelta = _PATIENCE, grace: float = _GRACE_S) -> None:
        """Makes the mates' own group; all ranks of `replica` call it.

        Raises:
            ReplicaLost: a rank has ended.
        """
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            command = install_command("torch")
            raise TypeError(
                f"join(replica=...) takes a process group of torch, which is not here: {command}"
            ) from error
        if not isinstance(replica, dist.ProcessGroup):
            raise TypeError(f"join(replica=...) takes a torch.distributed.ProcessGroup, not {replica!r:.80}")
        self._torch, self._dist = torch, dist
        self._ranks = dist.get_process_group_ranks(replica)
        self.position, self.size = dist.get_rank(replica), len(self._ranks)
        self._grace = grace
        self._ends = False
        self._pending: list[tuple[Any, Any]] = []  # words that were posted and not waited for
        self._rounds = Rounds(self.position, self.size)
        self._group = self.new_group(patience, "paceline mates")
        drawn = os.urandom(16) if self.position == 0 else bytes(16)
        self.id = self.gather(drawn)[0].hex()

    def new_group(self, patience: timedelta, description: str) -> ProcessGroup:
        """Makes a Gloo group of all mates, which call this at the same point.

        Raises:
            ReplicaLost: a mate has ended.
        """
        try:
            return self._dist.new_group(
                self._ranks, patience, backend="gloo", use_local_synchronization=True, group_desc=description
            )
        except RuntimeError as error:
            raise self.lost(error) from error

    def agree(self, values: Sequence[int]) -> list[int]:
        """Returns the elementwise maximum over all mates, which call it with equally many.

        Raises:
            ReplicaLost: a mate has ended.
        """
        return self._wait(*self._post(values))

    def gather(self, digest: bytes) -> list[bytes]:
        """Returns the digests of all mates, of one size, in the order of positions.

        Raises:
            ReplicaLost: a mate has ended.
        """
        values = [0] * (len(digest) * self.size)
        values[self.position * len(digest) : (self.position + 1) * len(digest)] = digest
        found = bytes(self.agree(values))
        return [found[start : start + len(digest)] for start in range(0, len(found), len(digest))]

    def enter(self, generation: int) -> None:
        """See `Alone`."""
        if generation > self._rounds.generation:
            self.leave()
            self._rounds.enter(generation)

    def go(self, point: Point, flags: StepFlag = _NO_FLAGS) -> StepFlag | None:
        """See `Alone`.

        Raises:
            ReplicaLost: a mate has ended.
        """
        self._hear_pending()
        while self._rounds.is_open:
            if (joint := self._rounds.hear(self.agree(self._rounds.go(point, flags)))) is not None:
                return joint
        return None

    def leave(self) -> None:
        """See `Alone`."""
        self._tell(self._rounds.leave())

    def cast_out(self) -> None:
        """See `Alone`."""
        self.leave()  # its mates have a word for that generation too, and the next one is for a later one
        self._tell(self._rounds.cast_out())

    def closed(self) -> None:
        """See `Alone`."""
        self._rounds.closed()

    def joint(self, digest: bytes) -> bytes:
        """See `Alone`."""
        return hashlib.sha256(b"".join(self.gather(digest))).digest() if self.size > 1 else digest

    def loss(self, error: BaseException) -> ReplicaLost | None:
        """See `Alone`. A mate that lives may be inside the block, so this does not wait for its word."""
        with contextlib.suppress(ReplicaLost):
            self.leave()
        for work, _ in self._pending:
            try:
                work.wait(_LOOK)
            except RuntimeError:
                if work.is_completed():
                    return self.lost(error)
        return self.lost(error) if self._ends else None

    def refuse(self, what: str) -> None:
        """See `Alone`."""
        if self.size > 1:
            raise UnsupportedOp(f"{what} is not there for replicas of several ranks yet: leave it out")

    def end(self, error: PacelineError) -> None:
        """See `Alone`. Aborts all groups of torch, since this rank may be in a collective that never ends."""
        if self._ends:
            return
        self._ends = True
        timer = threading.Timer(self._grace, self._exit, [str(error)])
        timer.daemon = True
        timer.start()
        for group in list(self._dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(Exception):  # a group whose backend cannot be aborted fails by itself
                group.abort()

    def _exit(self, text: str) -> None:
        _log.error("%s; this process still ran after %g s, and ends now", text, self._grace)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"paceline: {text}; this process still ran after {self._grace:g} s, and ends now\n")
            sys.stderr.flush()
        os._exit(1)

    def lost(self, cause: BaseException) -> ReplicaLost:
        """Returns the error that says that a mate has ended, as `cause` shows; this process ends soon."""
        error = ReplicaLost(
            "another rank of this worker's replica has ended, so this one ends too, and their launcher starts the "
            "replica again"
        )
        error.__cause__ = cause
        self.end(error)
        return error

    def _tell(self, word: list[int] | None) -> None:
        """Posts a word without waiting for the mates."""
        if word is not None:
            self._pending.append(self._post(word))

    def _hear_pending(self) -> None:
        """Learns the rounds of the words that were posted and not waited for."""
        while self._pending and self._rounds.is_open:  # else a mate may have left at the round that said so
            work, values = self._pending.pop(0)
            self._rounds.hear(self._wait(work, values))

    def _post(self, values: Sequence[int]) -> tuple[Any, Any]:
        tensor = self._torch.tensor(values, dtype=self._torch.int64, device="cpu")
        try:
            work = self._dist.all_reduce(tensor, self._dist.ReduceOp.MAX, self._group, async_op=True)
        except RuntimeError as error:
            raise self.lost(error) from error
        return work, tensor

    def _wait(self, work: Any, tensor: Any) -> list[int]:
        try:
            work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error
        return tensor.tolist()  # type: ignore[no-any-return]
