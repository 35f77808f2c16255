"""Finds a command's coordinator and credentials, and runs coordinators inside commands.

A command that serves a coordinator on loopback makes a token and stores it where this user's other commands find it;
that is how `paceline status` is admitted. Each such coordinator has a file named ADDRESS with its token, in a folder
that only the user can access. The command locks the file while it runs. So other commands recognise a file that a
killed command left behind, and do not send its token to a process that took the port.

Certificates and tokens come from the environment, because all users of a host can read arguments.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from paceline._base.addresses import DEFAULT_PORT, CoordinatorAddresses, Endpoint, parse_endpoint
from paceline._base.embedded import coordinator
from paceline._base.processes import check_own, make_private, user_folder
from paceline.cli.output import UsageError, say
from paceline.credentials import Credentials
from pacelinepb.private_files import FileTooOpen, read_own

_MAX_BYTES = 1024


@contextmanager
def published(address: str, token: str) -> Iterator[None]:
    """Stores the token where this user's other commands find it, for the duration of the block.

    If that fails, training still runs, and a line on stderr says what will not work.

    Args:
        address: "IP:port" of loopback. Another process could resolve a name to another address.
        token: the token that callers must show; empty if they take it from their environment.
    """
    try:
        path = _folder() / address
        lock = _publish(path, token)
    except OSError as error:
        if token:
            say(
                f"paceline status, drain and other launchers cannot reach this run: its token cannot be stored: {error}"
            )
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def own_token(address: str) -> str | None:
    """Returns the token of the coordinator that a command of this user serves there; None without either."""
    return _read(address) or None


def own_addresses() -> list[str]:
    """Returns the sorted addresses at which this user's commands serve coordinators now."""
    try:
        names = sorted(path.name for path in _folder().iterdir() if not path.name.startswith("."))
    except OSError:
        return []
    return [name for name in names if _read(name) is not None]


def _folder() -> Path:
    return user_folder("coordinators")


def _publish(path: Path, token: str) -> int:
    """Writes the file and locks it before it gets its name; returns the descriptor that holds the lock.

    Raises:
        OSError: the file cannot be written, or others can access the folder.
    """
    make_private(path.parent, "set TMPDIR to another directory")
    lock, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)  # 0600
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, token.encode())
        os.replace(temporary, path)
    except BaseException:
        os.close(lock)
        os.unlink(temporary)
        raise
    return lock


def _read(address: str) -> str | None:
    """Returns the content of the file if its command is alive, else None; reports a file that it refuses to use."""
    try:
        path = _folder() / address
        check_own(path.parent, "it is not used")
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        _say_once(f"cannot look for the token of a paceline run: {error}")
        return None
    try:
        return read_own(file, path, _MAX_BYTES).decode() if _is_locked(file) else None
    except (FileTooOpen, OSError, ValueError) as error:
        _say_once(f"cannot use the token of a paceline run: {error}")
        return None
    finally:
        os.close(file)


@cache
def _say_once(text: str) -> None:
    say(text)


def _is_locked(file: int) -> bool:
    """True while the command that made the file is alive; the system releases its lock, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def own_credentials(address: str) -> Credentials:
    """Returns the credentials with which a command calls a coordinator.

    Args:
        address: the coordinator's address. If a command of this user serves there and has made a token, that token is
            used: the one in the environment was not set when that command started, so it is for another coordinator.

    Raises:
        UsageError: the PACELINE_* variables cannot be used; the text says which.
    """
    found = _from_environment()
    token = own_token(address)
    return found if token is None else replace(found, token=token)


def worker_credentials(token: str | None = None) -> Credentials:
    """Returns the credentials that a command shares with its workers; an error shows here once, not in every worker.

    Args:
        token: the token that the command made for them; None for the one in the environment, if any.

    Raises:
        UsageError: the variables cannot be used, or workers cannot use them.
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


def endpoint(text: str, *, default_port: int = DEFAULT_PORT) -> Endpoint:
    """Parses HOST or HOST:PORT.

    Raises:
        UsageError: the text is neither; the message says what is wrong.
    """
    try:
        return parse_endpoint(text, default_port=default_port)
    except ValueError as error:
        raise UsageError(str(error)) from None


def addresses_of(text: str) -> str:
    """Returns the address of a coordinator, or of several with commas between them, with their ports.

    Raises:
        UsageError: an address is malformed.
    """
    try:
        return str(CoordinatorAddresses.parse(text, default_port=DEFAULT_PORT))
    except ValueError as error:
        raise UsageError(str(error)) from None


def coordinator_address(text: str | None) -> str:
    """Returns the coordinator that the operator named, else the one of this user's only `paceline run`.

    It turns localhost into 127.0.0.1 if this user serves a coordinator there, because tokens are stored by IP address.

    Raises:
        UsageError: the address is malformed; or none is named, and this user serves none or several.
    """
    if text is not None and "," in text:
        return addresses_of(text)
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
            raise UsageError(f"choose a coordinator (--coordinator): your commands serve {', '.join(several)}")


@dataclass(frozen=True, slots=True)
class Served:
    """The coordinator that a command's workers join.

    Attributes:
        address: its address, "host:port".
        token: what this or another command of this user made for it; None for the token in the environment, if any.
        page: the URL of the page, with the token that this command made, so that a browser is let in; empty for none.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    page: str = field(default="", repr=False)


@contextmanager
def own_coordinator(**settings: Any) -> Iterator[Served]:
    """Runs a coordinator on loopback for this command's workers and this user's other commands.

    If the environment has no token, it makes one, because every user of the machine can reach loopback.

    Args:
        settings: fields of `paceline_server.ServerSettings`.

    Raises:
        UsageError: the PACELINE_* variables for TLS and tokens cannot be used.
    """
    token = secrets.token_hex(32) if worker_credentials().token is None else None
    if token is not None:
        settings["token"] = token
    pages: list[str] = []
    with embedded_coordinator(**settings, on_page=pages.append) as address, published(address, token or ""):
        # A browser does not send what follows #, so the token is in no request line, log or Referer.
        yield Served(address, token, "".join(f"{url}#token={token}" if token else url for url in pages))


def say_where_the_page_is(served: Served) -> None:
    """Prints the URL of the page, if there is one."""
    if served.page:
        asks = "" if served.token else "; it asks for the token in PACELINE_TOKEN"
        say(f"the page is at {served.page}{asks}")


@contextmanager
def embedded_coordinator(**settings: Any) -> Iterator[str]:
    """Runs a coordinator, by default on loopback, and yields its address.

    The coordinator serves with a member's certificate, which must therefore contain the loopback address; those of
    `paceline certs` do.

    Args:
        settings: fields of `paceline_server.ServerSettings`.

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
