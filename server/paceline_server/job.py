"""What the dispatcher holds of one job."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from paceline_protocol.coordinator import Abandonment, Membership
from paceline_server.pages import ViewPages
from paceline_server.storeroom import Storeroom

__all__ = ["Job"]


@dataclass(slots=True)
class Job:
    """One job: what decides about it, and what the shell needs beside."""

    membership: Membership
    store: Storeroom
    abandonment: Abandonment
    door_secret: bytes = field(repr=False)
    """By which its members know each other, 32 bytes. New in each line; the same after a restart of the coordinator."""
    reason: str = ""
    """The policy's sentence as it was last logged."""
    timer: asyncio.TimerHandle | None = None
    failed: bool = False
    """A bug has ended its sessions: nothing is decided about it any more."""
    pages: ViewPages | None = None
    """The member list of the last view that was pushed or asked for."""
