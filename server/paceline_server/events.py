"""What happens to a job: the inputs of `membership.Membership`. What is to be done about it is in `effects`.

Events carry facts, as plain values, so a test reads: given these events, expect exactly these effects.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline_server.model import JobSettings, Met, Process, Progress, Report

__all__ = [
    "AddressRefused",
    "BarrierEntered",
    "DrainAsked",
    "Event",
    "ExitReported",
    "FinishStored",
    "FinishedLine",
    "Heard",
    "LeftJob",
    "MetOthers",
    "Registered",
    "Reported",
    "RestartAsked",
    "Resumed",
    "StoreFailed",
    "StreamEnded",
    "Ticked",
    "ViewStored",
]


@dataclass(frozen=True, slots=True)
class Registered:
    """A worker asks to become a member. Refused by raising; then nothing has changed."""

    member_id: str
    token_sha256: bytes
    stream: int
    process: Process
    address: str
    settings: JobSettings
    claimed_rank: int | None
    generation_floor: int
    former_member_id: str = ""
    """Which member this process was before, empty for none."""
    former_token_sha256: bytes = b""
    """What proves that it was."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """A member takes its session up again on a new stream. Refused by raising; then nothing has changed."""

    member_id: str
    token_sha256: bytes
    stream: int
    generation: int
    """The generation that it knows to be in, 0 for none."""


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A stream has ended without `leave`: suspicion, no more."""

    member_id: str
    stream: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat."""

    member_id: str
    progress: Progress


@dataclass(frozen=True, slots=True)
class BarrierEntered:
    """A member arrives at a named barrier."""

    member_id: str
    call: int
    generation: int
    name: str
    round: int
    timeout: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Reported:
    """A member saw something go wrong in its generation. `report.reporter` is filled in by the membership."""

    member_id: str
    generation: int
    report: Report


@dataclass(frozen=True, slots=True)
class ExitReported:
    """A launcher saw a process end."""

    process: Process
    exit_code: int
    """Exit code, or the negated number of the signal that killed it."""
    found_gone: bool = False
    """Nobody saw it end, but another process of its host found it gone."""


@dataclass(frozen=True, slots=True)
class AddressRefused:
    """A member's stream has ended, and nobody listens at its address: together they tell of its death."""

    member_id: str


@dataclass(frozen=True, slots=True)
class LeftJob:
    """A member goes for good."""

    member_id: str
    cause: str
    """Its own error, empty for an orderly end."""


@dataclass(frozen=True, slots=True)
class MetOthers:
    """A member has stopped in its generation, or a candidate is ready."""

    member_id: str
    met: Met


@dataclass(frozen=True, slots=True)
class FinishedLine:
    """A member saw the closing word complete."""

    member_id: str
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """An operator wants members to leave at their next step boundary."""

    member_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RestartAsked:
    """An operator swears that the members of the last view are dead; or that a finished job shall start again."""


@dataclass(frozen=True, slots=True)
class ViewStored:
    """The view of this generation is durable."""

    generation: int


@dataclass(frozen=True, slots=True)
class FinishStored:
    """That the line is done after this step is durable."""

    step: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The view of this generation could not be stored."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed."""

    slept: float = 0.0
    """Seconds for which the coordinator itself surely did not run just before."""


Event = (
    Registered
    | Resumed
    | StreamEnded
    | Heard
    | BarrierEntered
    | Reported
    | ExitReported
    | AddressRefused
    | LeftJob
    | MetOthers
    | FinishedLine
    | DrainAsked
    | RestartAsked
    | FinishStored
    | ViewStored
    | StoreFailed
    | Ticked
)
