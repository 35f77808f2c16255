"""Addresses on the command line."""

from __future__ import annotations

from paceline.cli.output import UsageError
from paceline.session.address import DEFAULT_PORT, Endpoint, parse_endpoint

__all__ = ["endpoint"]


def endpoint(text: str, *, default_port: int = DEFAULT_PORT) -> Endpoint:
    """Reads HOST or HOST:PORT.

    Raises:
        UsageError: it is neither; the text says what is wrong.
    """
    try:
        return parse_endpoint(text, default_port=default_port)
    except ValueError as error:
        raise UsageError(str(error)) from None
