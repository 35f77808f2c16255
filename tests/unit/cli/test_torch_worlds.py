"""The port at which the ranks of a replica meet, which is theirs alone until the replica starts again."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
from collections.abc import Iterator

import pytest

from paceline.cli.launcher.torch_worlds import TorchWorlds

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems let nobody listen at a port that is held"
)


@pytest.fixture
def worlds() -> Iterator[TorchWorlds]:
    with contextlib.closing(TorchWorlds(2)) as made:
        yield made


def port(worlds: TorchWorlds, index: int) -> int:
    return int(worlds.environment(index)["MASTER_PORT"])


def bind(number: int, *, shares: bool) -> socket.socket:
    bound = socket.socket()
    if shares:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("", number))
    except OSError:
        bound.close()
        raise
    return bound


def test_mates_have_one_port_and_each_replica_another(worlds: TorchWorlds) -> None:
    ports = [port(worlds, index) for index in range(400)]
    assert ports[::2] == ports[1::2]
    assert len(set(ports)) == 200


def test_a_replica_that_starts_again_has_another_port(worlds: TorchWorlds) -> None:
    first = [port(worlds, index) for index in range(4)]
    again = [port(worlds, index) for index in (2, 3)]
    assert again[0] == again[1] not in first


def test_rank_0_listens_at_the_reserved_port_and_no_other_process_gets_it(worlds: TorchWorlds) -> None:
    number = port(worlds, 0)
    with pytest.raises(OSError, match="in use") as refused:
        bind(number, shares=False)
    assert refused.value.errno == errno.EADDRINUSE
    with contextlib.ExitStack() as others:
        given = {others.enter_context(bind(0, shares=True)).getsockname()[1] for _ in range(200)}
        assert number not in given
    with bind(number, shares=True) as listener:  # as torch's store does
        listener.listen()
        assert port(worlds, 1) == number
        with socket.create_connection(("127.0.0.1", number)):
            pass


def test_ports_are_given_back_at_the_end(worlds: TorchWorlds) -> None:
    number = port(worlds, 0)
    worlds.close()
    bind(number, shares=False).close()
