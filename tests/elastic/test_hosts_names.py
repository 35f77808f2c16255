"""Members that advertise names, where the name of a dead host is looked up for many seconds.

So it is in a container network without a way out: the name goes with the container, and who asks for it then is passed
on to a DNS server that nobody reaches.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from support.elastic.cluster import cluster
from support.netns import network

pytestmark = pytest.mark.needs(what="root")

_FAILURE_TIMEOUT = 2.0


def test_name_lookups_of_a_dead_host_do_not_delay_survivors(tmp_path: Path) -> None:
    """One host of four dies with its name; the others go on as soon as if they had known each other by addresses."""
    with network(5) as net:
        names, servers = tmp_path / "hosts", tmp_path / "resolv.conf"
        lines = {host.name: f"{host.address} {host.name}\n" for host in net.hosts}
        names.write_text("".join(lines.values()))
        servers.write_text("nameserver 10.77.0.250\n")  # nobody has that address
        for host in net.hosts:
            host.etc = {"hosts": names, "resolv.conf": servers}
        plan = {"least": 2, "total": 200, "pace": 0.03, "failure_timeout": _FAILURE_TIMEOUT}
        with cluster(tmp_path, host=net.hosts[0], witness=False, **plan) as c:
            for host in net.hosts[1:]:
                c.environment["PACELINE_ADVERTISE"] = host.name
                c.start(1, host=host)
            c.wait_until(lambda: any(e["size"] == 4 for t in c.trainers for e in t.of("view") + t.of("joined")), "four")
            *others, victim = c.trainers
            c.wait_until(lambda: bool(victim.of("applied")), "all four train")
            generation = max(e["generation"] for e in victim.of("applied"))
            assert victim.host is not None
            del lines[victim.host.name]
            names.write_text("".join(lines.values()))
            killed = time.monotonic()
            victim.signal(signal.SIGKILL)

            def later() -> list[float]:
                """When each of the others first applied a step without it."""
                firsts = [[e["at"] for e in t.of("applied") if e["generation"] > generation] for t in others]
                return [min(first) for first in firsts if first]

            c.wait_until(lambda: len(later()) == len(others), "the others go on")
            assert set(c.wait().values()) == {0, -signal.SIGKILL}, str(c)
            c.check(count=3)
            assert max(later()) - killed < _FAILURE_TIMEOUT + 3, str(c)
            assert sum(c.redone().values()) <= 1, str(c)
