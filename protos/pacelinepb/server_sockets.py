"""The sockets of a server in this process that gives none of them to Python, as grpc's; Linux only.

They are found among the process's descriptors. The server may close each at any moment, and its number may then be of
another socket or file. So descriptors are read as they are, and not copied: to close the copy of a descriptor of a file
releases this process's locks on the file. Only `cut` copies one, which was a connection a moment ago, and makes sure
that it has the connection that was meant.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import resource
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

__all__ = ["LISTENS", "Place", "block", "block_of", "cut", "descriptors", "seen"]

Place = tuple[str, int]
"""The IP address and the port of a caller."""

LISTENS: Place = ("", 0)
"""Stands for the caller of a socket that listens."""

_RECEIVED = 128
"""Where `tcpi_bytes_received` is in `struct tcp_info` of linux/tcp.h: bytes of the stream that the kernel has taken."""

_ATTACH_FILTER, _DETACH_FILTER = 26, 27
"""SO_ATTACH_FILTER and SO_DETACH_FILTER of asm-generic/socket.h."""

_NETWORK_HEADER = 0xFFF00000
"""SKF_NET_OFF of linux/filter.h: offsets from here on are those of the packet's IP header."""

_LOAD_BYTE, _LOAD_WORD, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x74, 0x15, 0x06
"""Instructions of classic BPF, with constants (linux/bpf_common.h)."""


def descriptors() -> Iterable[int]:
    """Returns the numbers of this process's descriptors, and perhaps some that are not in use."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # listing takes a descriptor, and none is left
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def seen(fd: int, ports: Collection[int]) -> tuple[Place, int] | None:
    """Returns the caller and the bytes that it has sent, if the descriptor is a TCP connection of one of the ports.

    Of a socket that listens at one of them, returns `LISTENS` and 0; None of all else.
    """
    with contextlib.suppress(OSError), _borrowed(fd) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] not in ports:
            return None
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return LISTENS, 0
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED + 8)
        return _caller(sock), int.from_bytes(info[_RECEIVED:], "little")
    return None


def cut(fd: int, spare: int, caller: Place) -> bool:
    """Ends the caller's connection at once, and drops what it has sent that is not read yet.

    `shutdown` would leave that to be read, and it may be MiBs.

    Args:
        fd: the descriptor of the connection; it stays open.
        spare: a descriptor that becomes a copy of it, because no new one may be left.
        caller: whose connection it was; if it is another's by now, it is left alone.

    Returns:
        True if it was cut.
    """
    with contextlib.suppress(OSError):
        os.dup2(fd, spare, inheritable=False)
        with _borrowed(spare) as sock:
            if _caller(sock) == caller:  # connect(2) with AF_UNSPEC dissolves the association
                return not ctypes.CDLL(None).connect(spare, bytes(16), 16)
    return False


def block(fd: int, blocks: Collection[bytes]) -> None:
    """Has the kernel drop all packets that come from these blocks of addresses to a socket that listens.

    Connections that were accepted before take them as before.

    Args:
        fd: the descriptor of the socket.
        blocks: see `block_of`; 60 at most. With none, all packets are taken again.
    """
    with contextlib.suppress(OSError), _borrowed(fd) as sock:
        if not blocks:
            sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            return
        program = _dropping(blocks)
        code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
        sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", len(program), ctypes.addressof(code)))


def block_of(host: str) -> bytes:
    """Returns the addresses that a caller at this one has: 4 bytes for an IPv4 address, else the first 8 of 16."""
    return ipaddress.ip_address(host).packed[:8]


def _dropping(blocks: Collection[bytes]) -> list[tuple[int, int, int, int]]:
    """Returns the program of a packet filter. Lines are: instruction, lines to skip if true, if not, constant."""
    four = [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12)]
    six = []
    for each in blocks:
        words = [int.from_bytes(each[at : at + 4], "big") for at in range(0, len(each), 4)]
        if len(words) == 1:
            four += [(_IF_EQUAL, 0, 1, words[0]), (_RETURN, 0, 0, 0)]
        else:
            six += [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + 8), (_IF_EQUAL, 0, 3, words[0])]
            six += [(_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12), (_IF_EQUAL, 0, 1, words[1]), (_RETURN, 0, 0, 0)]
    whole = [(_RETURN, 0, 0, 0xFFFFFFFF)]
    version = [(_LOAD_BYTE, 0, 0, _NETWORK_HEADER), (_SHIFT_RIGHT, 0, 0, 4)]
    return [*version, (_IF_EQUAL, len(four) + 1, 0, 6), *four, *whole, *six, *whole]


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Lends a socket object for the block, which leaves the descriptor open.

    Raises:
        OSError: it is no socket, or one that blocks. Those of grpc never do, and Python would change another's to one
            that does not if the process has a default timeout (`socket.setdefaulttimeout`).
    """
    if not stat.S_ISSOCK(os.fstat(fd).st_mode) or os.get_blocking(fd):
        raise OSError
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def _caller(sock: socket.socket) -> Place:
    host, port = sock.getpeername()[:2]
    return host.removeprefix("::ffff:").partition("%")[0], port
