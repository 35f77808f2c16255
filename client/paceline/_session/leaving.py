"""How a member leaves its job: peers get what was sent, others are told of its error, and the session ends."""

from __future__ import annotations

import asyncio
import logging

from paceline import errors
from paceline._links.fault import Suspicion
from paceline._session.inbox import SessionOver
from paceline._session.member import MemberConnection
from pacelinepb.v1.errors_pb2 import ErrorReason

_log = logging.getLogger("paceline.session")

CLOSE_TIMEOUT = 2.0
"""Seconds for peers to receive what was sent, and again for the coordinator to answer the goodbye."""

_LAST_WORDS_S = 0.2
"""Seconds for the goodbye if the coordinator may be frozen."""

_LEAVE_TIMEOUT = 5 * CLOSE_TIMEOUT
"""Seconds after which a goodbye that does not end is given up, so that the process can end."""


def leave(member: MemberConnection, cause: str = "", *, exhausted: bool = False) -> None:
    """Leaves the job: first closes the links, so that peers get what was sent, then the session, then the door.

    `member` may not have come far. `cause` is its own error in words, empty for an orderly end. `exhausted` says that
    the process is out of memory, threads or descriptors.
    """
    member.inbox.put(SessionOver(errors.SessionClosed("this member has left the job")))
    mesh = member.generations.mesh
    # A coordinator that lives in one of the members may have failed together with a failed generation.
    doubted = not member.coordinator_returns and mesh is not None and mesh.fault.failed
    patience = _LAST_WORDS_S if doubted else CLOSE_TIMEOUT
    try:
        if member.generations.mesh is not None:
            if cause and member.mesh.peers:
                text = f"{member.mesh.peers[member.mesh.rank]} raised {cause}"
                operation = member.group._core.progress().operation
                member.mesh.fault.suspect(Suspicion(ErrorReason.ERROR_REASON_PEER_RAISED, None, operation, text))
            # A slow peer has time to receive what was sent; a lost one ends the wait.
            member.group.close(CLOSE_TIMEOUT, drain=member.config.step_timeout)
            member.store.close()
    finally:  # an interrupt ends the wait above, not the goodbye: no member must wait for this one
        if member.flight is not None:
            member.flight.close()
        member.barriers.fail(errors.SessionClosed("the session has ended"))
        member.thread.forget(member.on_broken)
        try:
            member.thread.run(_end(member, cause, patience, exhausted), _LEAVE_TIMEOUT, keep=True)
        except TimeoutError:  # grpc no longer works, for instance without memory or threads
            _log.error("job %r: leaving did not finish within %.0f s; giving up", member.job, _LEAVE_TIMEOUT)
        member.job_mark.remove()


async def _end(member: MemberConnection, cause: str, patience: float, exhausted: bool) -> None:
    member.left = True
    for task in member.tasks:
        task.cancel()
    await asyncio.gather(*member.tasks, return_exceptions=True)
    await member.generations.end()
    if member.control is not None:
        await member.control.leave(cause, patience)
    if not exhausted:  # grpc would wait for threads that cannot start, and hold the interpreter meanwhile
        await member.door.close()
    member.sockets.forget()
