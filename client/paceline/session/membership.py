"""What a worker asks of its job, and how it puts it to the coordinator."""

from __future__ import annotations

from paceline._rpc import duration
from paceline.collectives.choose import RULES, Rules, rules_digest
from paceline.session.identity import process_identity
from pacelinepb import PROTOCOL_VERSION
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["Membership"]


class Membership:
    """What a worker asks of its job: the bounds of the world, or a rank of its own.

    Attributes:
        rules: how its members choose among schedules.
    """

    def __init__(self, job: str, min_workers: int, max_workers: int, rank: int | None, rules: Rules = RULES) -> None:
        self.job = job
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.rank = rank
        self.rules = rules

    def register(self, address: str, failure_timeout: float) -> pb.Register:
        """The request that opens a session of this process.

        Args:
            address: where peers reach it.
            failure_timeout: seconds after which it wants silent members to be taken for lost.
        """
        return pb.Register(
            job=self.job,
            protocol_version=PROTOCOL_VERSION,
            process=process_identity(),
            address=address,
            settings=pb.JobSettings(
                min_workers=self.min_workers,
                max_workers=self.max_workers,
                failure_timeout=duration(failure_timeout),
                tuning=rules_digest(self.rules),
            ),
            rank=self.rank,
        )
