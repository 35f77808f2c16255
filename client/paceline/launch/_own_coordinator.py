"""Runs coordinators inside commands and schedulers, and finds the tokens of those that this user runs.

A command that serves a coordinator on loopback makes a token and stores it where this user's other commands find it;
that is how `paceline status` is admitted. Each such coordinator has a file named ADDRESS with its token, in a folder
that only the user can access. The command locks the file while it runs. So other commands recognise a file that a
killed command left behind, and do not send its token to a process that took the port.

Certificates and tokens come from the environment, because all users of a host can read arguments.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from paceline._base.addresses import parse_endpoint
from paceline._base.embedded import coordinator
from paceline._base.processes import check_own, make_private, user_folder
from paceline._base.proofs import TokenSource
from paceline._base.terminal import UsageError, say
from paceline._base.waits import loop_thread
from paceline.credentials import Credentials
from pacelinepb.private_files import FileTooOpen, read_own

_MAX_BYTES = 1024


@contextmanager
def published(address: str, token: str) -> Iterator[None]:
    """Stores the token where this user's other commands find it, for the duration of the block.

    If that fails, training still runs, and a line on stderr says what will not work. The address is "IP:port" of
    loopback: another process could resolve a name to another address. The token is empty if callers take it from their
    environment.
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
    """Writes the file and locks it before it gets its name; returns the descriptor that holds the lock."""
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

    If a command of this user serves there and has made a token, that token is used: the one in the environment was not
    set when that command started, so it is for another coordinator.

    Raises:
        UsageError: the PACELINE_* variables cannot be used; the text says which.
    """
    found = _from_environment()
    token = own_token(address)
    return found if token is None else replace(found, token=token)


def token_for(coordinator: str) -> str | None:
    """Returns the token that this process and its user's commands show to a coordinator now; None for none.

    Workers that inherit this process's environment need it only if `own_coordinator` made it: see
    `WorkerSettings.token`. A token in a file may change later (PACELINE_TOKEN_FILE).

    Args:
        coordinator: its address, "host:port".

    Raises:
        ValueError: the PACELINE_* variables cannot be used; the text says which.
    """
    source = own_credentials(coordinator).token
    return loop_thread().run(source.current()) if isinstance(source, TokenSource) else None


def worker_credentials(token: str | None = None) -> Credentials:
    """Returns the credentials that a command shares with its workers; an error shows here once, not in every worker.

    The token is the one that the command made for them; None for the one in the environment, if any.

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


@dataclass(frozen=True, slots=True)
class Served:
    """The coordinator that workers join; its `repr` contains no secret.

    Attributes:
        address: its address, "host:port".
        token: what this or another process of this user made for it; None for the token in the environment, if any.
        page: the URL of the page, with the token that this command made, so that a browser is let in; empty for none.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    page: str = field(default="", repr=False)


@contextmanager
def own_coordinator(*, listen: str = "127.0.0.1:0", make_token: bool = True, **settings: Any) -> Iterator[Served]:
    """Runs a coordinator in this process, for the workers that it starts; a context manager.

    Certificates and the token come from the environment (PACELINE_TLS_*, PACELINE_TOKEN or _TOKEN_FILE).
    If it has no token, one is made, because every user of the machine can reach loopback. This user's commands on
    this machine, such as `paceline status`, find the coordinator and its token.

    Args:
        listen: "host:port" to listen at; port 0 takes a free one. A host that stands for all interfaces ("0.0.0.0",
            "[::]") is not found by other commands: they have to name the coordinator.
        make_token: False for a coordinator that processes join which cannot be told a token: certificates must do.
        settings: other fields of `paceline_server.ServerSettings`. The useful ones: `restart_after=120.0`, seconds
            after which members of the last generation that nobody has seen end are taken for dead, if others wait;
            `settle_time`, seconds without an arrival after which a job starts with fewer workers than its maximum;
            `http="127.0.0.1:0"`, where to serve the page.

    Yields:
        Where it listens, and the token that was made. The token is good for all jobs, in every role: a worker that has
        it may drain others, too.

    Raises:
        ValueError: the variables for TLS and tokens cannot be used, or a setting is invalid; or no token is made, and
            nothing else keeps strangers out.
        OSError: the port is in use.
    """
    own = worker_credentials()
    if not make_token and own.token is None and own.cert is None:
        raise ValueError("callers need a token or certificates: set PACELINE_TOKEN, or PACELINE_TLS_CA, _CERT and _KEY")
    token = secrets.token_hex(32) if make_token and own.token is None else None
    if token is not None:
        settings["token"] = token
    pages: list[str] = []
    with ExitStack() as stack:
        address = stack.enter_context(embedded_coordinator(listen=listen, **settings, on_page=pages.append))
        if not ipaddress.ip_address(parse_endpoint(address).host).is_unspecified:
            stack.enter_context(published(address, token or ""))
        # A browser does not send what follows #, so the token is in no request line, log or Referer.
        yield Served(address, token, "".join(f"{url}#token={token}" if token else url for url in pages))


@contextmanager
def embedded_coordinator(**settings: Any) -> Iterator[str]:
    """Runs a coordinator, by default on loopback, and yields its address.

    The coordinator serves with a member's certificate, which must therefore contain the loopback address; those of
    `paceline certs` do.

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
