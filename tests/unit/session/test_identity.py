"""What a launcher says of a process is what the process says of itself."""

from __future__ import annotations

import subprocess
import sys

from paceline._session.identity import is_gone, process_identity
from pacelinepb.v1.session_pb2 import ProcessIdentity

CODE = """
import sys
from paceline._session.identity import process_identity
print(process_identity().SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


def test_a_launcher_and_its_worker_say_the_same() -> None:
    worker = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="ascii"
    )
    with worker:
        assert worker.stdout is not None
        own = ProcessIdentity.FromString(bytes.fromhex(worker.stdout.readline()))
        assert process_identity(worker.pid) == own
        assert own.pid_namespace
        assert own.start_ticks
        assert not is_gone(own)
    assert is_gone(own)
