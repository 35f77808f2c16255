"""Flight records of real workers: on a failed generation, and on a signal to the launcher."""

import json
import re
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.testing import coordinator
from support.command import command
from support.processes import workers

JOB = """
session = paceline.join(min_workers=2, max_workers=2)
g = session.group
g.all_reduce(np.ones((2, 3), np.float32))
g.subgroup([0, 1]).broadcast(np.arange(4))
try:
    g.all_gather(np.ones(2)) if g.rank else g.all_reduce(np.ones(2), op="max")
except paceline.PacelineError as error:
    emit_error(error)
session.leave()
"""


def records(directory: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(path.read_text()) for path in directory.glob("*.json")), key=lambda dump: dump["rank"])


def test_a_failed_generation_leaves_a_record_at_each_member(tmp_path: Path) -> None:
    with coordinator() as address, workers(2, JOB, COORDINATOR=address, FLIGHT_DIR=str(tmp_path), JOB="digits") as both:
        texts = {worker.expect("error")["text"] for worker in both}
        assert all(worker.wait() == 0 for worker in both)
    (text,) = texts
    assert re.search(r"operation 2: rank . .* called all_\w+ .*float64\[2\] where rank . .* called all_", text)
    dumps = records(tmp_path)
    assert [(dump["job"], dump["rank"], dump["size"], dump["generation"]) for dump in dumps] == [
        ("digits", 0, 2, 1),
        ("digits", 1, 2, 1),
    ]
    for dump in dumps:
        assert dump["reason"].startswith("abort: CollectiveMismatch: operation 2")
        first, part, last = dump["operations"]
        assert (first["number"], first["operation"], first["dtype"], first["shape"]) == (
            1,
            "all_reduce",
            "float32",
            [2, 3],
        )
        assert (first["bytes"], first["state"], first["group"]) == (24, "done", "")
        assert first["took_s"] >= 0
        assert (part["number"], part["operation"], part["state"]) == (1, "broadcast", "done")
        assert part["group"]
        assert (last["number"], last["state"]) == (2, "failed")
        assert "CollectiveMismatch" in last["error"]
    assert [dump["operations"][-1]["operation"] for dump in dumps] == ["all_reduce", "all_gather"], "where they differ"


WAITING = """
    import threading, time
    import numpy as np, paceline

    def say_when_it_waits(group):
        while group._core.recorder.snapshot()[-1]["operation"] == "barrier":
            time.sleep(0.01)
        print("ready", flush=True)

    with paceline.join() as session:
        session.group.barrier()
        threading.Thread(target=say_when_it_waits, args=(session.group,)).start()
        if session.rank == 0:
            session.group.recv(1, tag=9)                 # for ever
        else:
            session.group.all_reduce(np.ones(3))         # alone, for ever
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the launcher looks into /proc")
def test_sigusr2_to_the_launcher_dumps_every_ranks_operations(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(WAITING))
    with command("run", "-n", "2", str(script), PACELINE_FLIGHT_DIR=str(tmp_path / "flight")) as run:
        run.wait_for("ready", count=2)
        run.signal(signal.SIGUSR2)
        run.wait_for("the last ", count=2)  # the log lines that tell where the records are
        run.signal(signal.SIGTERM)
        run.wait()
        assert "asked 2 of 2 workers for a flight record" in run.stderr
    zero, one = records(tmp_path / "flight")
    assert zero["reason"] == one["reason"] == "signal SIGUSR2"
    assert [(entry["operation"], entry["state"]) for entry in zero["operations"]] == [
        ("barrier", "done"),
        ("recv", "running"),
    ]
    assert zero["operations"][-1]["detail"] == "from=1 tag=9"
    stuck = one["operations"][-1]
    assert (stuck["operation"], stuck["state"], stuck["number"]) == ("all_reduce", "running", 2)
