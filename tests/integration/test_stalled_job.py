"""A job of real workers that hangs: the page, the metrics and `paceline status` say for whom the others wait."""

from __future__ import annotations

import urllib.request
from itertools import count
from pathlib import Path
from typing import Any

from integration.test_http_commands import Page
from support.command import command

HANG = """
import sys
import time
from pathlib import Path
import numpy as np
import paceline

with paceline.join() as session:
    x = np.ones(8, np.float32)
    for number in range(1, 41):
        if number == 21 and session.rank == 1:
            while not Path(sys.argv[1]).exists():
                time.sleep(0.05)
        session.group.all_reduce(x, op="max")
        session.log(loss=10 * session.rank + number, rate=0.5)
        time.sleep(0.02)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.05)
"""


def metrics(page: Page) -> dict[str, str]:
    request = urllib.request.Request(f"{page.url}metrics", headers={"Authorization": f"Bearer {page.token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))


def test_a_hang_names_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    script, go_on, end = tmp_path / "hang.py", tmp_path / "go_on", tmp_path / "end"
    script.write_text(HANG)
    apart = {"TMPDIR": str(tmp_path)}  # from coordinators of other tests
    with command("run", "-n", "2", "--http", str(script), str(go_on), str(end), **apart) as running:
        page = Page(running)

        def until(seen: Any) -> dict[str, Any]:
            for _ in count():
                found: list[dict[str, Any]] = page.ask("api/jobs", page.token)["jobs"]
                if found and seen(found[0]):
                    return found[0]
            raise AssertionError

        # A busy machine may stall earlier, at the first collective, too.
        stalled = until(lambda job: job["stalled_s"] and job["stall"].endswith(" all_reduce 21"))
        assert stalled["stall"].startswith("rank 1 (")
        assert stalled["stall"].endswith(") has not entered all_reduce 21")
        assert (stalled["phase"], stalled["totals"]["operations"]) == ("running", 21)
        assert stalled["totals"]["logged"] == {"loss": 25.0, "rate": 0.5}, "the mean of both ranks after collective 20"
        assert float(metrics(page)['paceline_job_stalled_seconds{job="default"}']) >= 2.0
        with command("status", "default", **apart) as status:
            assert status.wait() == 0, str(status)
        assert "stalled for " in status.stdout
        assert "has not entered all_reduce 21" in " ".join(status.stdout.split())

        go_on.touch()
        going = until(lambda job: job["totals"]["operations"] == 40 and not job["stalled_s"])
        assert going["totals"]["logged"]["loss"] <= 45.0
        held = metrics(page)
        assert float(held['paceline_operations_total{job="default"}']) == 40.0
        assert float(held['paceline_logged{job="default",name="rate"}']) == 0.5
        told = page.ask("api/jobs/default/history", page.token)
        lengths = {len(told[name]) for name in ("at", "step", "operations", "goodput")}
        assert lengths == {len(told["logged"]["loss"])}
        assert sorted(told["operations"]) == told["operations"]
        members = page.ask("api/jobs/default", page.token)["members"]
        assert all(member["memory_bytes"] > 10e6 and member["cpu"] is not None for member in members)
        end.touch()
        assert running.wait() == 0, str(running)
