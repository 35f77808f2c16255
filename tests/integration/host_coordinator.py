"""A coordinator on a host of the test's network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from support.netns import Host

__all__ = ["coordinator_on"]


@contextmanager
def coordinator_on(host: Host) -> Iterator[str]:
    """A coordinator there for the block; its address."""
    address = f"{host.address}:7077"
    command = host.command([sys.executable, "-m", "paceline_server", "--listen", address])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        assert "listening" in process.stdout.readline()
        yield address
    finally:
        process.kill()
        process.communicate()
