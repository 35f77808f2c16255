"""The figures that the README's users can rely on: the gRPC ring, a failure's news, and the time to import.

They are asserted with the slack of a shared machine of 2 cores; `-s` prints what was measured.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from typing import Any

import pytest

from paceline.testing import coordinator
from support.processes import workers

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(300)]


def bench(*arguments: str) -> dict[int, dict[str, Any]]:
    """Rows of `paceline bench ... --json` by size."""
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "bench", *arguments, "--json"], capture_output=True, text=True, check=True
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    return {row["bytes"]: row for row in rows}


def test_grpc_ring() -> None:
    rows = bench("all-reduce", "-n", "2", "--sizes", "1KiB,16MiB")
    small, large = rows[1024]["median_us"], rows[16 << 20]["busbw_GBps"]
    print(f"\nW=2 over grpc: 1 KiB {small:.0f} us, 16 MiB {large:.2f} GB/s bus bandwidth")
    assert small <= 800
    assert large >= 0.5


def test_import() -> None:
    code = (
        "import time; start = time.perf_counter(); import paceline; light = time.perf_counter() - start;"
        "paceline.join, paceline.DDP, paceline.Group; print(light, time.perf_counter() - start)"
    )
    times = [
        [float(word) for word in subprocess.check_output([sys.executable, "-c", code], text=True).split()]
        for _ in range(7)
    ]
    light, whole = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"\nimport paceline {light * 1000:.0f} ms; with all that join and DDP need {whole * 1000:.0f} ms")
    assert whole < 0.3


BLOCKED = """
with paceline.join() as session:
    session.group.all_reduce(np.ones(1000))
    session.barrier("linked")
    emit("joined", rank=session.rank)
    try:
        session.group.all_reduce(np.ones(1000)) if session.rank else wait_for_go()
    except paceline.PacelineError as error:
        emit_error(error)
"""


@pytest.mark.parametrize(("number", "bound"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 4.0)], ids=["death", "freeze"])
def test_news_of_a_failure(number: signal.Signals, bound: float) -> None:
    """From the signal to the typed error in the last of three others, at the default failure_timeout of 3 s."""
    took = []
    for _ in range(5 if number is signal.SIGKILL else 2):
        with coordinator() as address, workers(4, BLOCKED, COORDINATOR=address, MIN_WORKERS="4") as started:
            ranks = {worker.expect("joined")["rank"]: worker for worker in started}
            sent = ranks[0].signal(number)
            took.append(max(ranks[rank].expect("error")["at"] for rank in (1, 2, 3)) - sent)
    print(f"\n{number.name}: news in {statistics.median(took) * 1000:.0f} ms (worst {max(took) * 1000:.0f} ms)")
    assert max(took) < bound
