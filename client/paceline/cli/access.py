"""Finds a command's coordinator; what is served, and with which token, is in `paceline.launch`."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from paceline._base.addresses import DEFAULT_PORT, CoordinatorAddresses, Endpoint, parse_endpoint
from paceline._base.terminal import UsageError, say
from paceline.launch._own_coordinator import Served, own_addresses


def endpoint(text: str, *, default_port: int = DEFAULT_PORT) -> Endpoint:
    """Parses HOST, HOST:PORT, or a PORT of loopback: no host's name is a number."""
    if text.isdecimal():
        text = f"127.0.0.1:{text}"
    try:
        return parse_endpoint(text, default_port=default_port)
    except ValueError as error:
        raise UsageError(str(error)) from None


def addresses_of(text: str) -> str:
    """Returns the address of a coordinator, or of several with commas between them, with their ports."""
    try:
        return str(CoordinatorAddresses.parse(text, default_port=DEFAULT_PORT))
    except ValueError as error:
        raise UsageError(str(error)) from None


def coordinator_address(text: str | None) -> str:
    """Returns the coordinator that the operator named, else the one of this user's only `paceline run`.

    It turns localhost into 127.0.0.1 if this user serves a coordinator there, because tokens are stored by IP address.
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


def say_where_the_page_is(served: Served) -> None:
    """Prints the URL of the page, if there is one."""
    if served.page:
        asks = "" if served.token else "; it asks for the token in PACELINE_TOKEN"
        say(f"the page is at {served.page}{asks}")


def keep_the_page(served: Served) -> None:
    """Goes on to serve the page, if there is one, until the user at the terminal presses a key; without one, returns.

    Nobody would press one where standard input or output is no terminal, or another command has it. SIGTERM, and the
    SIGHUP of a terminal that is closed, are as good as a key: the job has ended, with a code that remains its own.
    """
    if not (served.page and sys.stdout.isatty() and _may_read(sys.stdin)):
        return
    closed = (OSError, termios.error)
    with suppress(KeyboardInterrupt, *closed), _like_ctrl_c(signal.SIGTERM, signal.SIGHUP):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)  # keys that were pressed while the job was running
        say("the page is served until you press Enter or Ctrl-C")
        sys.stdin.readline()


def _may_read(stream: TextIO) -> bool:
    """Says whether a stream is a terminal, and this process in its foreground; else the kernel would stop a reader."""
    try:
        return stream.isatty() and os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except OSError:  # it is not this session's, or was closed
        return False


@contextmanager
def _like_ctrl_c(*signals: signal.Signals) -> Iterator[None]:
    """Lets signals raise `KeyboardInterrupt` inside the block."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
