"""How commands reach a coordinator: its address, the credentials they show, and the coordinators inside commands.

A command that serves a coordinator on loopback makes a token, and keeps it where this user's other commands find it:
that is how `paceline status` gets in. Each such coordinator has a file, ADDRESS, with its token, in a folder of the
user's own. The command holds a lock on it as long as it lives, so a file that a killed command left behind is
recognised, and its token is not shown to a process that took the port.

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

from paceline._address import DEFAULT_PORT, Endpoint, parse_endpoint
from paceline._embedded import coordinator
from paceline._user_folder import check_own, make_private, user_folder
from paceline.cli.output import UsageError, say
from paceline.credentials import Credentials
from pacelinepb.private_files import FileTooOpen, read_own

__all__ = [
    "Served",
    "coordinator_address",
    "embedded_coordinator",
    "endpoint",
    "own_addresses",
    "own_coordinator",
    "own_credentials",
    "own_token",
    "published",
    "worker_credentials",
]

_MAX_BYTES = 1024


@contextmanager
def published(address: str, token: str) -> Iterator[None]:
    """Keeps the token where this user's other commands find it, for as long as the block lasts.

    Without such a place training goes on all the same: a line on stderr says what will not work.

    Args:
        address: "IP:port" of loopback. A name could mean another address to whoever looks it up.
        token: what was made for its callers to show; empty if they are to have that of their environment.
    """
    try:
        path = _folder() / address
        lock = _publish(path, token)
    except OSError as error:
        if token:
            say(f"paceline status, drain and other launchers cannot ask this run: its token cannot be kept: {error}")
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(lock)


def own_token(address: str) -> str | None:
    """The token that was made for a coordinator of this user's commands; None if none of them serves there with one."""
    return _read(address) or None


def own_addresses() -> list[str]:
    """Where this user's commands serve coordinators now, in order."""
    try:
        names = sorted(path.name for path in _folder().iterdir() if not path.name.startswith("."))
    except OSError:
        return []
    return [name for name in names if _read(name) is not None]


def _folder() -> Path:
    return user_folder("coordinators")


def _publish(path: Path, token: str) -> int:
    """Writes the file, locked before it has its name; returns the descriptor that holds the lock.

    Raises:
        OSError: it cannot be written, or the folder is not this user's alone.
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
    """What a file holds whose command lives; None if there is none. A file that should not be used is told of."""
    try:
        path = _folder() / address
        check_own(path.parent, "it is not used")
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        _say_once(f"no token of paceline run is looked for: {error}")
        return None
    try:
        return read_own(file, path, _MAX_BYTES).decode() if _is_locked(file) else None
    except (FileTooOpen, OSError, ValueError) as error:
        _say_once(f"the token of a paceline run is not used: {error}")
        return None
    finally:
        os.close(file)


@cache
def _say_once(text: str) -> None:
    say(text)


def _is_locked(file: int) -> bool:
    """True while the command that made the file lives; the system takes its lock away, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


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
