"""Runs of pytest at the same time never choose the same port."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from support.ports import Share


def test_each_process_has_its_own_share_of_ports() -> None:
    with ExitStack() as exits:
        shares = [Share() for _ in range(3)]
        for share in shares:
            exits.callback(share.give_back)
        chosen = [share.free_port() for share in shares for _ in range(300)]  # more than a share has: some come twice
        assert all(port % 250 for port in chosen)  # the first of a share is what holds it
        assert len({share.first for share in shares}) == len({port // 250 for port in chosen}) == 3


def test_ports_in_use_are_skipped() -> None:
    share = Share()
    try:
        with socket.socket() as taken:
            port = share.free_port(10)  # connections that ended not long ago still have some of the ports
            share._next -= 10
            assert share.free_port(2) == port
            taken.bind(("127.0.0.1", port + 5))
            assert share.free_port(2) == port + 2
            assert share.free_port(2) == port + 6
            assert share.free_port() == port + 8
    finally:
        share.give_back()
