"""A coordinator inside a command, for its workers alone: with the TLS and the token that they have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from paceline.cli.credentials import worker_credentials
from paceline.cli.output import UsageError
from paceline.embedded import coordinator

__all__ = ["embedded_coordinator"]


@contextmanager
def embedded_coordinator(**settings: Any) -> Iterator[str]:
    """Runs a coordinator on loopback; yields its address.

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
            address = stack.enter_context(coordinator(**files, **token_settings(None, os.environ), **settings))
        except ValueError as error:
            raise UsageError(str(error)) from None
        yield address
