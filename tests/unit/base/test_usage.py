"""A worker knows how much of the machine it uses."""

from __future__ import annotations

import sys
import time

import pytest

from paceline._base.usage import ProcessUsage


def test_processor_time_is_measured_in_cores() -> None:
    usage = ProcessUsage()
    time.sleep(0.2)
    assert usage.cores() < 0.5
    began = time.process_time()
    while time.process_time() < began + 0.2:
        pass
    assert usage.cores() > 0.02, "a busy machine may have given it little"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_memory_grows_with_what_is_held() -> None:
    before = ProcessUsage.memory()
    held = b"x" * (64 << 20)
    assert ProcessUsage.memory() - before > len(held) // 2
