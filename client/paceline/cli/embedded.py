"""Coordinators inside a command, with the TLS and the token that its workers have."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.cli.credentials import worker_credentials
from paceline.cli.output import UsageError
from paceline.cli.own_coordinators import published
from paceline.embedded import coordinator

__all__ = ["Served", "embedded_coordinator", "own_coordinator"]


@dataclass(frozen=True, slots=True)
class Served:
    """Where a command's workers meet.

    Attributes:
        address: of the coordinator, "host:port".
        token: that this command or another of this user made for it; None for that of the environment, if there is one.
    """

    address: str
    token: str | None = field(default=None, repr=False)


@contextmanager
def own_coordinator(**settings: Any) -> Iterator[Served]:
    """Runs a coordinator on loopback for the workers of this command alone, and for this user's other commands.

    Without a token in the environment it has a new one: every user of the machine reaches loopback.

    Args:
        settings: of `paceline_server.ServerSettings`.

    Raises:
        UsageError: the PACELINE_* variables for TLS and tokens cannot be used.
    """
    token = secrets.token_hex(32) if worker_credentials().token is None else None
    if token is not None:
        settings["token"] = token
    with embedded_coordinator(**settings) as address, published(address, token or ""):
        yield Served(address, token)


@contextmanager
def embedded_coordinator(**settings: Any) -> Iterator[str]:
    """Runs a coordinator, on loopback if nothing else is asked for; yields its address.

    It serves with the certificate of a member, which must hold the loopback address for that: those of `paceline certs`
    do.

    Args:
        settings: of `paceline_server.ServerSettings`.

    Raises:
        UsageError: the PACELINE_* variables for TLS and tokens cannot be used.
    """
    from paceline_server.settings import token_settings

    worker_credentials()
    variables = {name: os.environ.get(f"PACELINE_{name.upper()}") for name in ("tls_ca", "tls_cert", "tls_key")}
    files: dict[str, Any] = {name: Path(path) for name, path in variables.items() if path}
    with ExitStack() as stack:
        try:
            whole = files | token_settings(None, os.environ) | settings
            address = stack.enter_context(coordinator(**whole))
        except ValueError as error:
            raise UsageError(str(error)) from None
        yield address
