"""A block that one process of each host runs, and a process that dies in it."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path

from support.processes import Worker

CODE = """
emit("asks")
with paceline.once_per_host({path!r}) as first:
    emit("inside", first=first)
    {inside}
emit("done")
"""


def test_a_process_killed_in_once_per_host_releases_the_block(tmp_path: Path) -> None:
    path = str(tmp_path / "downloaded")
    with ExitStack() as stack:

        def start(inside: str) -> Worker:
            worker = Worker(CODE.format(path=path, inside=inside), {})
            stack.callback(worker.close)
            return worker

        holder = start("wait_for_go()")
        holder.expect("asks")
        assert holder.expect("inside")["first"]
        others = [start("pass"), start("pass")]
        for worker in others:
            worker.expect("asks")
        killed_at = holder.signal(signal.SIGKILL)
        told = [worker.expect("inside") for worker in others]
        assert min(each["at"] for each in told) > killed_at
        assert sorted(each["first"] for each in told) == [False, True], "the next one does what the dead one had begun"
        for worker in others:
            worker.expect("done")
            assert worker.wait() == 0
