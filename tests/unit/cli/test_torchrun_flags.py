"""What torchrun's flags mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from paceline._base.addresses import Endpoint
from paceline.cli.torchrun import Flags, Plan, read_flags, read_streams, token_of


def plan(job: str = "default", cores: int = 8, accelerated: bool = False, **given: Any) -> Plan:
    return read_flags(Flags(**given), job=job, cores=cores, accelerated=accelerated)


@pytest.mark.parametrize(
    ("text", "nodes"), [(None, (1, 1)), ("1", (1, 1)), ("3", (3, 3)), ("1:4", (1, 4)), ("2:2", (2, 2))]
)
def test_nodes(text: str | None, nodes: tuple[int, int]) -> None:
    read = plan(nnodes=text)
    assert (read.min_nodes, read.max_nodes) == nodes
    assert read.alone == (nodes == (1, 1))


@pytest.mark.parametrize("text", ["0", "two", "4:1", "1:", ":4", "1:2:3", "-1"])
def test_nodes_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="--nnodes must be a number from 1, or MIN:MAX"):
        plan(nnodes=text)


@pytest.mark.parametrize(("text", "workers"), [(None, 1), ("4", 4), ("cpu", 8), ("auto", 8)])
def test_workers(text: str | None, workers: int) -> None:
    assert plan(nproc_per_node=text).workers == workers


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
def test_workers_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="--nproc-per-node must be a number from 1, cpu or auto"):
        plan(nproc_per_node=text)


@pytest.mark.parametrize("text", ["gpu", "xpu", "auto"])
def test_devices_are_not_guessed(text: str) -> None:
    with pytest.raises(ValueError, match="give the number"):
        plan(nproc_per_node=text, accelerated=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rdzv_backend": "etcd-v2"}, "--rdzv-backend etcd-v2: launchers always meet at a Paceline coordinator"),
        ({"standalone": True, "nnodes": "2"}, "--standalone means one node, but --nnodes 2 means more"),
        ({"nnodes": "1:4", "node_rank": 0}, "--node-rank needs a fixed number of nodes"),
        ({"nnodes": "2", "node_rank": 2}, "--node-rank 2 is outside of 2 nodes"),
        ({"node_rank": 1}, "--node-rank 1 is outside of 1 node "),
        ({"master_port": 0}, "--master-port must be 1 to 65535, not 0"),
        ({"master_port": 65535, "nnodes": "2"}, "say where with --rdzv-endpoint"),
        ({"max_restarts": -1}, "--max-restarts must be 0 or more, not -1"),
        ({"rdzv_id": "x" * 121}, "--rdzv-id can have at most 120 bytes"),
        ({"rdzv_endpoint": "host:port"}, "not an address of the form host:port"),
        ({"rdzv_endpoint": "localhost:0", "nnodes": "2"}, "other nodes need to know it"),
    ],
)
def test_what_cannot_be(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan(**given)


@pytest.mark.parametrize(
    ("given", "meeting", "serves"),
    [
        ({}, None, None),  # one launcher needs no place that others know
        ({"rdzv_endpoint": "localhost:0"}, None, None),
        ({"rdzv_endpoint": "node1:2000", "standalone": True}, None, None),
        ({"rdzv_endpoint": "node1:2000", "nnodes": "2"}, Endpoint("node1", 2000), None),
        ({"rdzv_endpoint": "node1", "nnodes": "1:2"}, Endpoint("node1", 29400), None),
        ({"nnodes": "1:4"}, Endpoint("127.0.0.1", 29501), None),
        ({"nnodes": "2", "node_rank": 0, "master_addr": "node1"}, Endpoint("node1", 29501), True),
        ({"nnodes": "2", "node_rank": 1, "master_addr": "node1"}, Endpoint("node1", 29501), False),
        ({"nnodes": "2", "master_addr": "::1", "master_port": 3000}, Endpoint("::1", 3001), None),
        ({"nnodes": "2", "master_addr": "[::1]", "master_port": 3000}, Endpoint("::1", 3001), None),
    ],
)
def test_where_launchers_meet(given: dict[str, Any], meeting: Endpoint | None, serves: bool | None) -> None:
    read = plan(**given)
    assert (read.meeting, read.serves) == (meeting, serves)


@pytest.mark.parametrize(
    ("given", "is_open"),
    [
        ({}, False),
        ({"nnodes": "2"}, False),
        ({"nnodes": "2", "rdzv_endpoint": "localhost:2000"}, False),
        ({"nnodes": "2", "master_addr": "::1"}, False),
        ({"rdzv_endpoint": "node1:2000"}, False),
        ({"nnodes": "1:2", "rdzv_endpoint": "node1:2000"}, True),
        ({"nnodes": "2", "node_rank": 1, "master_addr": "10.0.0.1"}, True),
    ],
)
def test_whether_other_machines_can_come_in(given: dict[str, Any], is_open: bool) -> None:
    assert plan(**given).is_open == is_open


def test_a_random_name_is_a_secret() -> None:
    secrets = ["0123456789abcdef" * 2, "F81D4FAE-7dec-11d0-a765-00a0c91e6bf6", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"]
    tokens = {token_of(secret) for secret in secrets}
    assert len(tokens) == 3
    assert not tokens & {None, *secrets}
    for guessed in ("default", "12345", "f" * 31, "an-experiment-with-a-very-long-name-of-its-own", "f" * 32 + "g"):
        assert token_of(guessed) is None


def test_the_run_s_name_and_rank_0_s_port() -> None:
    assert plan(job="digits").run_id == "digits"
    assert plan(job="digits", rdzv_id="7").run_id == "7"
    given = {"nnodes": "2", "master_addr": "[fd00::1]", "master_port": 3000, "max_restarts": 3}
    read = plan(**given, node_rank=0)
    assert (read.master_addr, read.master_port, read.max_restarts) == ("fd00::1", 3000, 3)
    assert plan(**given).master_addr is None  # rank 0 may be at any node
    assert plan().master_port is None  # a free one


def test_a_launcher_alone_is_node_0_and_others_are_numbered_when_they_meet() -> None:
    assert plan().node == 0
    assert plan(nnodes="2").node is None
    assert plan(nnodes="2", node_rank=1).node == 1


def test_which_flags_were_given() -> None:
    assert Flags().given == []
    assert Flags(nproc_per_node="2", node_rank=0, standalone=True).given == [
        "--nproc-per-node",
        "--node-rank",
        "--standalone",
    ]


def test_streams_that_are_kept_and_hidden() -> None:
    assert not read_streams(None, None, 2).kept
    assert not read_streams("0", "0", 2).kept
    assert read_streams("1", None, 2).hidden == {(0, "stdout"), (1, "stdout")}
    assert read_streams("0:3,1:2", None, 2).hidden == {(0, "stdout"), (0, "stderr"), (1, "stderr")}
    tee = read_streams("3", "1:1", 2)
    assert tee.kept
    assert (1, "stdout") not in tee.hidden
    assert (0, "stdout") in tee.hidden
    assert read_streams(None, "3", 2).kept
    assert not read_streams(None, "3", 2).hidden


@pytest.mark.parametrize("text", ["4", "x", "0:4", "1:", ":1", "a:1", "1,2"])
def test_streams_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="-t/--tee must be 0"):
        read_streams(None, text, 2)
