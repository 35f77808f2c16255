"""grpc is set up before it is first imported, whichever way a process comes to Paceline.

Each is asked in a process of its own (`tests/pytorch/test_names.py` asks the backend of torch).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from unit.protos.grpc_settings import SET, run_asked

import paceline
import paceline_server
import pacelinepb

ENTRIES = {
    "join": "import paceline; paceline.join().leave()",
    "coordinator": "import paceline_server",
    "embedded coordinator": "from paceline._base.embedded import coordinator\nwith coordinator(): pass",
    "test": "import paceline.testing",
    "command": "import paceline.cli\nsys.argv = ['paceline', 'status', '127.0.0.1:1']\n"
    "try: paceline.cli.main()\nexcept SystemExit: pass",
    "launcher": "import paceline.cli.run_command, paceline.cli.launcher.launcher",
    "health check": "import paceline.cli.health",
    "run-rank": "import paceline_mpi._run_rank",
    "spare": "import numpy\nfrom paceline.cli.warm import warm_up; warm_up(['-m', 'paceline.demo.train'], bool)",
    "Ray's driver": "import paceline_ray._controller",
    "Ray's worker": "import paceline_ray._hosted_worker",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_each_entry_point_configures_grpc_before_importing_it(entry: str) -> None:
    assert run_asked(ENTRIES[entry]).stdout.startswith(SET)


def test_grpc_settings_of_the_user_are_kept() -> None:
    assert '"GRPC_ENABLE_FORK_SUPPORT": "1"' in run_asked(ENTRIES["join"], GRPC_ENABLE_FORK_SUPPORT="1").stdout


def test_a_script_that_imports_grpc_too_early_is_warned() -> None:
    early = "import grpc\n" + ENTRIES["join"]
    assert "set GRPC_ENABLE_FORK_SUPPORT=0 in the environment of this script" in run_asked(early).stderr
    assert run_asked(early, GRPC_ENABLE_FORK_SUPPORT="0").stderr == ""


def test_a_worker_runs_without_coordinator_only_packages() -> None:
    without = "sys.modules.update(dict.fromkeys(('grpc_health', 'grpc_reflection', 'paceline_server')))\n"
    assert run_asked(without + ENTRIES["join"]).stdout == SET


def test_only_safe_grpc_imports_grpc() -> None:
    """Stubs do too: `_grpc` of the same package is imported before them, or when the package is (the coordinator's)."""
    for package in (paceline, paceline_server, pacelinepb):
        for file in Path(str(package.__file__)).parent.rglob("*.py"):
            if file.name == "safe_grpc.py" or file.name.endswith("_pb2_grpc.py"):
                continue
            source = file.read_text()
            if "grpc" not in source:
                continue
            names = {
                alias.name if isinstance(node, ast.Import) else str(node.module)
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            }
            assert not {name for name in names if name.split(".")[0] in ("grpc", "grpc_status")}, file
