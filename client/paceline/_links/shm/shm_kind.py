"""Shared memory as a kind of link (`_links.kind`), between members of one node that have the same kernel and user."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline._links.kind import Incoming, Kind, LinkContext, Outgoing
from paceline._links.shm import handover
from paceline._links.shm.arena import arena
from paceline.config import Config
from paceline.credentials import Credentials
from paceline.errors import LinkUnavailable
from pacelinepb.v1 import peer_pb2

_log = logging.getLogger("paceline.links")


class ShmKind(Kind):
    """See `Kind`. It needs no credentials: the kernel says which user's process is at the other end.

    Names of hosts play no role. The view says which members share memory (`Peer.node`), and the kernel confirms it when
    the memory is handed over. `host` receives it; None while this worker shares none.
    """

    name = "shm"
    number = peer_pb2.LINK_KIND_SHM
    preference = 30

    def __init__(self, config: Config, credentials: Credentials) -> None:
        self.host: handover.ShmHost | None = None

    async def start(self, host: str) -> None:
        """See `Kind.start`. The socket's name does not depend on the door's address."""
        if self.host is None:
            try:
                self.host = handover.ShmHost(asyncio.get_running_loop())
            except LinkUnavailable as error:
                _log.info("no shared memory for links to members of this host; they use another kind: %s", error)

    def offer(self, context: LinkContext, hello: peer_pb2.HelloRequest) -> bool:
        """See `Kind.offer`."""
        return self.host is not None and _shares_memory(context)

    def expect(
        self,
        hello: peer_pb2.HelloRequest,
        context: LinkContext,
        ticket: bytes,
        on_open: Callable[[Incoming], None],
    ) -> peer_pb2.HelloResponse | None:
        """See `Kind.expect`."""
        if self.host is None or not _shares_memory(context):
            return None
        self.host.expect(ticket, on_open, context.fault, context.peer, context.neighbours)
        return peer_pb2.HelloResponse(shm_name=self.host.name)

    async def open(
        self, answer: peer_pb2.HelloResponse, context: LinkContext, stream: object, timeout: float
    ) -> Outgoing:
        """See `Kind.open`."""
        loop = asyncio.get_running_loop()
        return await handover.connect(
            answer.shm_name, answer.ticket, context.fault, context.peer, loop, timeout, context.neighbours
        )

    def empty(self, shape: int | tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any] | None:
        """See `Kind.empty`."""
        return None if self.host is None else arena().empty(shape, dtype)

    def close(self) -> None:
        """See `Kind.close`."""
        if self.host is not None:
            self.host.close()


def _shares_memory(context: LinkContext) -> bool:
    return bool(context.node) and context.node == context.peer.node
