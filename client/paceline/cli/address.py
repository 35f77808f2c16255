"""Addresses on the command line."""

from __future__ import annotations

from paceline._address import DEFAULT_PORT, Endpoint, parse_endpoint
from paceline.cli.output import UsageError
from paceline.cli.own_coordinators import own_addresses

__all__ = ["coordinator_address", "endpoint"]


def endpoint(text: str, *, default_port: int = DEFAULT_PORT) -> Endpoint:
    """Reads HOST or HOST:PORT.

    Raises:
        UsageError: it is neither; the text says what is wrong.
    """
    try:
        return parse_endpoint(text, default_port=default_port)
    except ValueError as error:
        raise UsageError(str(error)) from None


def coordinator_address(text: str | None) -> str:
    """The coordinator that an operator means: the one that is named, else that of this user's one `paceline run`.

    What serves at 127.0.0.1 for this user is meant by localhost too: by that name its token would not be shown.

    Raises:
        UsageError: it is malformed, or none is named and there is none or several.
    """
    if text is not None:
        named = endpoint(text)
        here = str(Endpoint("127.0.0.1", named.port))
        return here if named.host == "localhost" and here in own_addresses() else str(named)
    match own_addresses():
        case [address]:
            return address
        case []:
            raise UsageError("name the coordinator (--coordinator): no paceline run of yours has one on this machine")
        case several:
            raise UsageError(f"say which coordinator (--coordinator): your commands have {', '.join(several)}")
