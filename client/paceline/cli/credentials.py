"""Certificates and tokens of commands: from the environment, for arguments can be read by all users of a host."""

from __future__ import annotations

from paceline.cli.output import UsageError
from paceline.credentials import Credentials

__all__ = ["own_credentials", "worker_credentials"]


def own_credentials() -> Credentials:
    """Those of a command that talks to a coordinator.

    Raises:
        UsageError: the variables cannot be used; the text says which.
    """
    try:
        return Credentials.from_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None


def worker_credentials() -> Credentials:
    """Those of a command whose workers have the same: a fault is found here once, rather than in every worker.

    Raises:
        UsageError: the variables cannot be used, or not by workers.
    """
    try:
        return own_credentials().for_worker()
    except ValueError as error:
        raise UsageError(str(error)) from None
