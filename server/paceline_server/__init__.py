"""The coordinator: it decides who trains together, says what ended a generation, and keeps barriers and a small store.

Decisions about jobs are made in `paceline_protocol`, by pure functions that take the time as an argument and return
effects. This package is the shell (`dispatcher`, `services`, `app`) that performs the effects on grpc.aio, and it has
what only the coordinator needs: storage, tokens, budgets. It never imports `paceline`: both sides share only the
protocol.
"""

from __future__ import annotations

from paceline_server import _grpc  # noqa: F401  # before anything else imports grpc: see `_grpc`
from paceline_server.app import Coordinator
from paceline_server.listening import PortInUse
from paceline_server.serving import serve
from paceline_server.settings import ServerSettings
from paceline_server.storage.base import StateUnusable

__all__ = ["Coordinator", "PortInUse", "ServerSettings", "StateUnusable", "serve"]
