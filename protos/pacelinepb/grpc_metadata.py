"""Bounds the metadata of a call that grpc.aio makes Python objects of.

grpc reads a call's metadata before anybody can look at a token, and applies its limit (16 KiB) only to callers that
have acknowledged its settings. One that has not can send half a million fields with a call, a byte each (HPACK). Making
objects of these takes half a second of the event loop, in which no member is answered, and 70 MB.

grpc.aio has no option for that, so three names in its extension module are replaced: the coroutine function that serves
a call, the one that it calls once it has made the metadata, and the type of a field.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any

__all__ = ["MOST_BYTES", "TooMuchMetadata", "bound_metadata"]

MOST_BYTES = 16 << 10
"""The most metadata of a call, counted as HTTP/2 counts it (RFC 9113, 6.5.2); grpc's own limit."""

_FIELD_BYTES = 32

_NAMES = ("_Metadatum", "_handle_rpc", "_find_method_handler")


class TooMuchMetadata(Exception):
    """A call has more metadata than `MOST_BYTES`. grpc.aio answers it with UNKNOWN."""


def bound_metadata(cygrpc: Any) -> None:
    """Bounds the metadata of the calls that this process serves; logs a warning if this grpcio does not allow it.

    Args:
        cygrpc: grpc's extension module.
    """
    if missing := [name for name in _NAMES if not callable(getattr(cygrpc, name, None))]:
        logging.getLogger("paceline").warning(
            "Paceline cannot bound the metadata of calls, because this grpcio has no %s: a stranger who reaches the "
            "port can keep the coordinator or a worker from answering. Install a grpcio that Paceline supports",
            ", ".join(missing),
        )
        return
    field, serve, find = (getattr(cygrpc, name) for name in _NAMES)
    # Nothing is awaited between `bounded_serve` and `bounded_find`. Other threads may serve or make calls meanwhile.
    count = threading.local()

    def bounded_field(key: str, value: str | bytes) -> Any:
        count.left = getattr(count, "left", math.inf) - (_FIELD_BYTES + len(key) + len(value))
        if count.left < 0:
            raise TooMuchMetadata
        return field(key, value)

    async def bounded_serve(*arguments: Any) -> None:
        count.left = MOST_BYTES
        served = serve(*arguments)
        del arguments  # the call keeps the exception that ends it, whose traceback must not lead back to the call
        try:
            await served
        finally:  # the method's name may have been unreadable
            count.left = math.inf

    def bounded_find(*arguments: Any) -> Any:
        count.left = math.inf
        return find(*arguments)

    for name, bounded in zip(_NAMES, (bounded_field, bounded_serve, bounded_find), strict=True):
        setattr(cygrpc, name, bounded)
