"""Hosts as in `netns`, but with cables that delay, lose and are slow, which takes no netem: see `tapswitch`.

    with tap_network([Cable(delay=0.02, loss=0.01)] * 4) as net: ...

Python forwards some 50,000 frames a second: this is for protocols, not for figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from support.netns import Network, up
from support.tapswitch import Cable

__all__ = ["Cable", "TapNetwork", "tap_network"]

_SWITCH = Path(__file__).with_name("tapswitch.py")
_PATIENCE = 20.0  # seconds for the switch to begin, and to end


class TapNetwork(Network):
    """Hosts on cables.

    Args:
        cables: of each host.
        seed: of what is lost.

    Attributes:
        told: once it is closed, how many frames came to the switch, were lost by luck, and found a queue too long.
    """

    def __init__(self, cables: Sequence[Cable], seed: int = 1) -> None:
        super().__init__(len(cables))
        self.told: dict[str, int] = {}
        self._cables = cables
        self._seed = seed
        self._process: subprocess.Popen[str] | None = None

    def _lay_cables(self) -> None:
        names = [host.name for host in self.hosts]
        plan = {"namespaces": names, "cables": [asdict(cable) for cable in self._cables], "seed": self._seed}
        self._process = subprocess.Popen(
            [sys.executable, str(_SWITCH), json.dumps(plan)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the switch did not begin"

    def close(self) -> None:
        """As `Network.close`, once the switch has told what came of the frames."""
        try:
            if self._process is not None:
                told, _ = self._process.communicate(timeout=_PATIENCE)
                self.told = json.loads(told or "{}")
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            super().close()


@contextmanager
def tap_network(cables: Sequence[Cable], seed: int = 1) -> Iterator[TapNetwork]:
    """A host for each cable, for the block; skips the test, or fails it, where there can be none."""
    made = TapNetwork(cables, seed)
    if not Path("/dev/net/tun").exists():
        pytest.fail("no /dev/net/tun: the kernel lacks TAP devices, or their module is not loaded")
    with up(made):
        yield made
