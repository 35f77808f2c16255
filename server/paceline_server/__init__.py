"""The coordinator: it forms memberships, says what ended them, and keeps barriers and a small store.

Decisions are pure (`admission`, `policy`, `verdict`, `membership`, `barriers`, `keyvalue`, `stall`): they take the time
as an argument and return effects. A thin shell (`dispatcher`, `services`, `app`) performs them on grpc.aio.
This package never imports `paceline`: the two sides share nothing but the protocol.
"""

from __future__ import annotations

from paceline_server import _grpc  # noqa: F401  # before anything else loads grpc: see there
from paceline_server.app import Coordinator
from paceline_server.listening import PortInUse
from paceline_server.serve import serve
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import StateUnusable

__all__ = ["Coordinator", "PortInUse", "ServerSettings", "StateUnusable", "serve"]
