"""Contacts of ranks before they make a communicator: a member of another world of MPI is refused by name."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from paceline_mpi import _mpi_engine
from paceline_mpi._mpi_engine import _read_contacts


def contact(rank: object, world: str = "job/4", key: str = "k") -> bytes:
    return json.dumps({"world": world, "rank": rank, "key": f"{key}{rank}", "name": f"worker {rank}"}).encode()


@pytest.fixture(autouse=True)
def world_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi: Any = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: 4))
    monkeypatch.setattr(_mpi_engine, "load_mpi", lambda: mpi)


def test_contacts_give_ranks_in_view_order_and_the_first_key() -> None:
    contacts = [contact(3), contact(0), contact(2)]
    assert [_read_contacts(contacts, rank) for rank in range(3)] == [([3, 0, 2], "k3")] * 3


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (contact(1, world="another/4"), "worker 1 was not started by the same mpirun, and MPI's world cannot grow"),
        (contact(0), "worker 0 says that it is rank 0 of MPI's world"),
        (contact(4), "worker 4 says that it is rank 4"),
        (contact(-1), "worker -1 says that it is rank -1"),
        (contact("x"), "a contact cannot be read"),
        (b"", "a contact cannot be read"),
        (b"[]", "a contact cannot be read"),
        (b"\xff", "a contact cannot be read"),
        (b'{"world": "job/4"}', "a contact cannot be read"),
    ],
)
def test_contacts_that_are_invalid_or_of_another_world_are_refused(other: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _read_contacts([contact(0), other], 0)
