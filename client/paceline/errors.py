"""All exceptions that Paceline raises, in one tree.

PacelineError
    InvalidRank (ValueError)            a rank, root or peer outside the world
    InvalidWorldSize (ValueError)       an impossible world size
    SizeMismatch (ValueError)           an array of the wrong size or shape
    UnsupportedOp (TypeError)           an operation that the dtype does not have, or a type that cannot be sent
    SettingsMismatch (ValueError)       members disagree on a setting of the job, or two claim one rank
    StoreConflict                       a store value that cannot be used as asked
    LimitExceeded                       a limit on size or number
    CollectiveMismatch                  members called different collectives, or one with different arguments
    ConcurrentUse (RuntimeError)        two threads in the collectives of one group, in an order that ranks cannot
                                        share, or one thread with two sessions in one job
    PeerLost (ConnectionError)          a member died, froze, was cut off or left
        PeerBrokeProtocol               a member sent what the protocol does not allow
        PeerRaised                      a member's own code raised, or was interrupted, inside a collective
        ReplicaLost                     a rank of this worker's replica has ended
    OperationTimeout (TimeoutError)     something that was waited for did not happen in time
    CoordinatorUnreachable (ConnectionError)   no process, or no Paceline coordinator, answers at the address
        TlsFailed                       no TLS with the coordinator: its certificate, ours, or it speaks no TLS at all
    NotAuthenticated (PermissionError)  the coordinator demands a token, or does not know the one it got
    NotPermitted (PermissionError)      the token is for another job, or its role permits less
    StaleGeneration                     use of a generation that is over
    DataWorkerLost (RuntimeError)       a process that fetches data for this one has died
    StepVoid                            a step whose generation was voided
        StepSkipped                     a step that a member has skipped for all
    StepOrderError                      a collective or a gradient at a moment when it cannot be valid, or a rank that
                                        skips a step or leaves the loop alone
    DivergenceError                     members hold different bits where they must hold the same
    OrphanedError                       cut off from the coordinator for longer than `rejoin_timeout`
    SessionClosed                       use of a session that has ended
    ForkedSession (RuntimeError)        use of a session in a child of the process that joined
    LinkUnavailable                     no way to move bytes to a member
    CheckpointDamaged (ValueError)      a checkpoint that is not what was written
    CheckpointFailed (OSError)          a checkpoint that ranks could not write together
Dismissed (SystemExit)                  no error: this worker has nothing more to do
"""

from __future__ import annotations

__all__ = [
    "CheckpointDamaged",
    "CheckpointFailed",
    "CollectiveMismatch",
    "ConcurrentUse",
    "CoordinatorUnreachable",
    "DataWorkerLost",
    "Dismissed",
    "DivergenceError",
    "ForkedSession",
    "InvalidRank",
    "InvalidWorldSize",
    "LimitExceeded",
    "LinkUnavailable",
    "NotAuthenticated",
    "NotPermitted",
    "OperationTimeout",
    "OrphanedError",
    "PacelineError",
    "PeerBrokeProtocol",
    "PeerLost",
    "PeerRaised",
    "ReplicaLost",
    "SessionClosed",
    "SettingsMismatch",
    "SizeMismatch",
    "StaleGeneration",
    "StepOrderError",
    "StepSkipped",
    "StepVoid",
    "StoreConflict",
    "TlsFailed",
    "UnsupportedOp",
]


class PacelineError(Exception):
    """Root of the tree.

    Attributes:
        ranks: the ranks to blame, ascending; empty if there are none in particular.
        operation: number of the collective that raised, 0 for none.
        generation: the generation that is concerned, 0 for none.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), operation: int = 0, generation: int = 0) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.operation = operation
        self.generation = generation


class InvalidRank(PacelineError, ValueError):
    """A rank, root or peer lies outside the world."""


class InvalidWorldSize(PacelineError, ValueError):
    """A world size is impossible, or a group would be empty."""


class SizeMismatch(PacelineError, ValueError):
    """An array has the wrong size or shape for what was asked."""


class UnsupportedOp(PacelineError, TypeError):
    """The dtype does not have the operation, or the type cannot be sent."""


class SettingsMismatch(PacelineError, ValueError):
    """Members disagree on a setting of the job, or two of them claim one rank."""


class StoreConflict(PacelineError):
    """A value in the store cannot be used as asked."""


class LimitExceeded(PacelineError):
    """A limit on size or number was met; the text names it."""


class CollectiveMismatch(PacelineError):
    """Members called different collectives, or the same one with different arguments; the text names both sides."""


class ConcurrentUse(PacelineError, RuntimeError):
    """Two threads were in the collectives of one group at once, in an order that need not be that of other ranks.

    Or one thread asked for a second session in its job, which would wait for the first.
    """


class PeerLost(PacelineError, ConnectionError):
    """A member died, froze, was cut off or left while others needed it."""


class PeerBrokeProtocol(PeerLost):
    """A member sent what the protocol does not allow."""


class PeerRaised(PeerLost):
    """A member's own code raised, or was interrupted, inside a collective."""


class ReplicaLost(PeerLost):
    """A rank of this worker's replica has ended, so the replica is of no use any more: its launcher starts it again."""


class OperationTimeout(PacelineError, TimeoutError):
    """Something that was waited for did not happen in time; the text says what, and which member it depends on."""


class CoordinatorUnreachable(PacelineError, ConnectionError):
    """No process, or no Paceline coordinator, answers at the address."""


class TlsFailed(CoordinatorUnreachable):
    """There can be no TLS with the coordinator, and retrying will not help; the text says why and what to do."""


class NotAuthenticated(PacelineError, PermissionError):
    """The coordinator demands a token, or does not know the one it got."""


class NotPermitted(PacelineError, PermissionError):
    """The token is for another job, or its role does not permit this."""


class StaleGeneration(PacelineError):
    """A generation was used that is over."""


class DataWorkerLost(PacelineError, RuntimeError):
    """A process that fetched data for this one has died; the text says which, and how."""


class StepVoid(PacelineError):
    """The generation of a step was voided: the step has no effect."""


class StepSkipped(StepVoid):
    """A member has called `Step.skip`: all members undo the step, and the loop goes on behind it.

    It is raised inside the step's block, which swallows it.
    """


class StepOrderError(PacelineError):
    """A collective, a gradient or a question for the rank came when it cannot be valid, or ranks' loops differ."""


class DivergenceError(PacelineError):
    """Members hold different bits where they must hold the same; the text names them."""


class OrphanedError(PacelineError):
    """The member cannot go on.

    It has not reached the coordinator for longer than `rejoin_timeout`, or a part of a state that was sharded over
    members is lost, and there is no checkpoint.
    """


class SessionClosed(PacelineError):
    """The session has ended."""


class ForkedSession(PacelineError, RuntimeError):
    """The session belongs to the parent of this process; a forked child must join for itself."""


class LinkUnavailable(PacelineError):
    """There is no way to move bytes to a member; the text says what was tried."""


class CheckpointDamaged(PacelineError, ValueError):
    """A checkpoint is not what was written, or cannot be read; the text names a file and the trouble."""


class CheckpointFailed(PacelineError, OSError):
    """A checkpoint that ranks write together was not written; the text says at which rank, and why."""


class Dismissed(SystemExit):
    """This worker has nothing more to do: it was drained, or the job is done. Uncaught, it ends the process with 0.

    Attributes:
        reason: which of the two, in words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
