"""Certificates and tokens of commands: from the environment, for arguments can be read by all users of a host."""

from __future__ import annotations

from dataclasses import replace

from paceline.cli.output import UsageError
from paceline.cli.own_coordinators import own_token
from paceline.credentials import Credentials

__all__ = ["own_credentials", "worker_credentials"]


def own_credentials(address: str) -> Credentials:
    """Those of a command that talks to a coordinator.

    Args:
        address: the coordinator's. Where a command of this user serves there and has made a token, it is that one: a
            token of the environment was not there when the command began, and is for another coordinator.

    Raises:
        UsageError: the variables cannot be used; the text says which.
    """
    found = _from_environment()
    token = own_token(address)
    return found if token is None else replace(found, token=token)


def worker_credentials(token: str | None = None) -> Credentials:
    """Those of a command whose workers have the same: a fault is found here once, rather than in every worker.

    Args:
        token: one that the command made for them; None for that of the environment, if it has one.

    Raises:
        UsageError: the variables cannot be used, or not by workers.
    """
    found = _from_environment()
    try:
        return (found if token is None else replace(found, token=token)).for_worker()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _from_environment() -> Credentials:
    try:
        return Credentials.from_environment()
    except ValueError as error:
        raise UsageError(str(error)) from None
