"""The news that a loop over steps sends to its launcher, and through it to the user."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from paceline._links.base import Peer
from paceline._session.launcher_pipe import tell_launcher, tell_once

_log = logging.getLogger("paceline.elastic")

_NAMED = 4
"""Ranks that a sentence names; of more it says how many."""


def tell_of_loop(job: str, *, unfinished: bool, done: bool = False, waits: bool = False, left: bool = False) -> None:
    """Tells the launcher whether this worker has steps to take: then its end is a loss, even with exit code 0.

    The job may be `done`. A worker that `waits` to be taken in again, or has `left` the loop, does not hang in it.
    """
    record = {"job": job, "unfinished": unfinished, "done": done, "waits": waits, "left": left, "pid": os.getpid()}
    begins = unfinished and not (waits or left)
    tell_launcher("loop", record, wait_s=0.0 if begins else 1.0)


def tell_new_ranks(job: str, generation: int, old: Sequence[Peer], new: Sequence[Peer], noun: str) -> None:
    """Says which members have another rank in this generation than in the one before; `noun` is "rank" or "replica"."""
    before = {peer.member_id: peer.rank for peer in old}
    moved = [(before[peer.member_id], peer.rank) for peer in new if before.get(peer.member_id, peer.rank) != peer.rank]
    if not moved:
        return
    names = ", ".join(f"{noun} {was} is now {noun} {now}" for was, now in moved[:_NAMED])
    more = f" (and {len(moved) - _NAMED} more)" if len(moved) > _NAMED else ""
    tell_once(_log, f"generation {generation}: {names}{more}", key=f"ranks of {job} {generation}", level=logging.INFO)
