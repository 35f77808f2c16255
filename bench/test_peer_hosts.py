"""Compares Paceline's TCP links with Gloo and Open MPI between hosts; each rank has a network namespace as its host.

The three take turns and sleep in between, so other load on the machine affects all alike. The hosts share the cores.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from conductor import SOCKET, Measured, Recipe, measure, stage
from figures import NOISE, at_least
from integration.host_coordinator import coordinator_on
from jobs import Job
from paceline.launch._environment import allowed_cores, share_of_cores
from support.netns import Host, network
from support.peers import need_peers

pytestmark = [pytest.mark.needs(what="peers"), pytest.mark.needs(what="root"), pytest.mark.timeout(600)]

BENCH = Path(__file__).parent

SIZES = tuple(64 << 10 << 2 * power for power in range(6))
"""Sizes in bytes, from 64 KiB to 64 MiB."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}


def test_all_reduce_between_hosts_beats_gloo(tmp_path: Path) -> None:
    """W=2: requires at least 1.3 times Gloo's bus bandwidth at every size; Open MPI's figures are only printed."""
    need_peers()
    with network(2) as net, coordinator_on(net.hosts[0]) as address:
        contenders = [_paceline(net.hosts, address), _gloo(net.hosts), _openmpi(net.hosts, tmp_path)]
        ratios = {}
        with stage(contenders, world=2) as ensembles:
            for size in SIZES:
                found = {each.contender.impl: each for each in measure(Job("all_reduce", size), ensembles, 1.0)}
                assert {impl: each.lacks for impl, each in found.items() if each.lacks is not None} == {}
                assert _links(found["paceline"]) == {"tcp"}
                times = {impl: statistics.median(each.seconds) for impl, each in found.items()}
                ratios[size] = times["gloo"] / times["paceline"]
                told = "".join(f"  {impl} {seconds * 1e6:10.1f} us" for impl, seconds in times.items())
                print(f"\n{size >> 10:>8} KiB{told}", end="")
    assert min(ratios.values()) >= max(at_least(1.3), 1 / NOISE), ratios


def _links(found: Measured) -> set[str]:
    return {link for turn in found.turns for link in turn.links}


def _paceline(hosts: Sequence[Host], coordinator: str) -> Recipe:
    job = {"PACELINE_COORDINATOR": coordinator, "PACELINE_MIN_WORKERS": str(len(hosts)), "PACELINE_FLIGHT_DIR": "off"}
    return _recipe("paceline", _on_each(hosts, [str(BENCH / "contenders.py"), SOCKET, "paceline", "any"]), job)


def _gloo(hosts: Sequence[Host]) -> Recipe:
    words = [str(BENCH / "peers.py"), SOCKET, "gloo", str(len(hosts))]
    return _recipe("gloo", _on_each(hosts, words), {})


def _openmpi(hosts: Sequence[Host], folder: Path) -> Recipe:
    """Makes the recipe for mpirun on the first host, with a script in place of ssh to reach the others."""
    agent = folder / "agent"
    cases = "\n".join(f'{host.address}) exec {shlex.join(host.command(["sh", "-c"]))} "$*" ;;' for host in hosts)
    agent.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase "$host" in\n{cases}\nesac\n')
    agent.chmod(0o700)
    options = {
        "plm_rsh_agent": str(agent),
        "btl": "tcp,self",
        "btl_tcp_if_include": "eth0",
        "oob_tcp_if_include": "eth0",
    }
    words = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(len(hosts))]
    words += ["--host", ",".join(f"{host.address}:1" for host in hosts)]
    words += [word for name, value in options.items() for word in ("--mca", name, value)]
    rank = [sys.executable, str(BENCH / "peers.py"), SOCKET, "openmpi-rank", str(len(hosts))]
    return _recipe("openmpi", hosts[0].command([*words, *rank]), {})


def _on_each(hosts: Sequence[Host], arguments: Sequence[str]) -> list[str]:
    """Returns a command that runs Python on every host, on its share of the cores, and waits until all have ended."""
    python = [sys.executable, *arguments]
    lines = []
    for number, host in enumerate(hosts):
        cores = share_of_cores(number, len(hosts), allowed_cores()) or allowed_cores()
        lines.append(shlex.join(host.command(["taskset", "-c", ",".join(map(str, cores)), *python])))
    script = "".join(f'{line} & all="$all $!"\n' for line in lines) + 'for one in $all; do wait "$one" || exit; done'
    return ["sh", "-c", script.replace(shlex.quote(SOCKET), '"$0"'), SOCKET]


def _recipe(impl: str, command: Sequence[str], variables: Mapping[str, str]) -> Recipe:
    return Recipe(impl, impl, "tcp", command, {**os.environ, **ONE_THREAD, **variables})
