"""Whether this process can share memory."""

from __future__ import annotations

import os
import select
import socket

from paceline.errors import LinkUnavailable

__all__ = ["check_available"]

_NEEDED = ((os, "memfd_create"), (os, "eventfd"), (os, "posix_fallocate"), (select, "epoll"), (socket, "SCM_RIGHTS"))


def check_available() -> None:
    """Checks that this system has what shared memory needs.

    Raises:
        LinkUnavailable: it has not; the text says what is missing.
    """
    missing = [name for module, name in _NEEDED if not hasattr(module, name)]
    if missing:
        raise LinkUnavailable(f"no shared memory with peers: this system, or its Python, has no {', '.join(missing)}")
