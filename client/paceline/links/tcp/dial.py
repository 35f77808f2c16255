"""Dials the data sockets of a half that this member writes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl

from paceline.errors import LinkUnavailable
from paceline.links.fault import Fault
from paceline.links.tcp.outgoing import TcpOutgoing
from paceline.links.tcp.ready import retry
from paceline.links.tcp.stream import make_stream, tune
from paceline.links.tcp.wire import ACCEPTED, MAX_STREAMS, Hello, encode_hello

__all__ = ["connect"]


async def connect(
    host: str,
    port: int,
    ticket: bytes,
    streams: int,
    fault: Fault,
    peer: str,
    *,
    loop: asyncio.AbstractEventLoop,
    timeout: float,
    context: ssl.SSLContext | None = None,
    server_name: str | None = None,
) -> TcpOutgoing:
    """Connects all streams of a half to a `TcpHost`.

    Args:
        host: name or IP address of the peer.
        port: of its `TcpHost`.
        ticket: what the peer expects.
        streams: how many connections, 1 to MAX_STREAMS; the same as the peer expects.
        fault: how the generation ends.
        peer: who it is, for errors.
        loop: the running one.
        timeout: seconds for all of it.
        context: for TLS, see `tls.client_context`; None for none.
        server_name: what the peer's certificate has to hold; needed with TLS.

    Raises:
        LinkUnavailable: it did not come about; frames go another way.
    """
    if not 1 <= streams <= MAX_STREAMS or (context is not None and not server_name):
        raise ValueError(f"{streams} streams, to be known by the name {server_name!r}")
    with contextlib.ExitStack() as made:
        hellos = [encode_hello(Hello(ticket, index, streams)) for index in range(streams)]
        tasks = [loop.create_task(_dial(made, loop, host, port, hello, context, server_name)) for hello in hellos]
        try:
            async with asyncio.timeout(timeout):
                socks = await asyncio.gather(*tasks)
        except (OSError, TimeoutError) as error:  # an ssl.SSLError is an OSError
            why = _why(error, timeout)
            raise LinkUnavailable(f"no data connection to {peer} at {host}:{port}: {why}") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        streams_made = [make_stream(sock) for sock in socks]
        try:
            half = TcpOutgoing(streams_made, fault, peer)
        except OSError as error:  # no descriptor is left
            for stream in streams_made:
                stream.close()
            raise LinkUnavailable(f"no data connection to {peer} at {host}:{port}: {error.strerror}") from error
        made.pop_all()
    return half


def _why(error: BaseException, timeout: float) -> str:
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError | socket.gaierror):
        return os.strerror(error.errno)  # asyncio's own text says only that the call failed
    return str(error) or f"no answer in {timeout:g} s"


async def _dial(
    made: contextlib.ExitStack,
    loop: asyncio.AbstractEventLoop,
    host: str,
    port: int,
    hello: bytes,
    context: ssl.SSLContext | None,
    server_name: str | None,
) -> socket.socket:
    """One connection, accepted; closed with `made` if that ends early."""
    sock = await _reach(loop, host, port)
    made.callback(lambda: sock.close())
    if context is not None:
        secure = context.wrap_socket(sock, server_hostname=server_name, do_handshake_on_connect=False)
        sock = secure
        await retry(loop, secure, secure.do_handshake)
    sent = await retry(loop, sock, lambda: sock.send(hello))
    assert sent == len(hello), "a new connection has room for a hello"
    answer = await retry(loop, sock, lambda: sock.recv(len(ACCEPTED)))
    if answer != ACCEPTED:
        raise ConnectionError("it was not accepted" if not answer else "the answer is none")
    return sock


async def _reach(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    """A connection to the first of the host's addresses that takes one."""
    failure: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        tune(sock)
        try:
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or OSError(f"{host} has no address")
