"""The library of an engine is imported before a worker is anybody's peer: no step waits for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.testing import coordinator

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest]

JOINING = """
import sys
import numpy, paceline

assert "torch" not in sys.modules
with paceline.join() as session:
    print("paceline.torch._gloo_engine" in sys.modules)
"""

WARMING = """
import sys
import numpy
from paceline.cli.warm import warm_up

warm_up(["-m", "paceline.demo.train"], bool)
print("paceline.torch._gloo_engine" in sys.modules)
"""


def printed(code: str, **environment: str) -> str:
    """What a new interpreter prints; others are forked from one that has imported torch."""
    environ = os.environ | {f"PACELINE_{name}": value for name, value in environment.items()}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_join_imports_the_engine() -> None:
    with coordinator() as address:
        assert printed(JOINING, COORDINATOR=address, ENGINE="gloo") == "True"
        assert printed(JOINING, COORDINATOR=address, JOB="other") == "False"


def test_warm_up_of_a_spare_imports_the_engine() -> None:
    assert printed(WARMING, ENGINE="gloo") == "True"
    assert printed(WARMING) == "False"
