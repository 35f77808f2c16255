"""Runs PyTorch's own tests of reconfiguration against "paceline": a copy of theirs, for it is in no wheel.

    python tests/pytorch/fault_tolerance.py .../pytorch/test/distributed/test_c10d_fault_tolerance.py [PATTERN ...]

Ends with 0 if all pass but those that their file itself skips for any backend but its own. Processes are forked from
this one, which has loaded torch and Paceline and has no thread: else each would take seconds. torch 2.15 or newer.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import unittest
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import paceline.torch.backend
import paceline.torch.backend._reconfigurable  # noqa: F401
import paceline_server.app  # noqa: F401  of the coordinator that each member has


def load(path: Path) -> Any:
    """Their file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, f"{path} is no file of Python's"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(file: str, *patterns: str) -> int:
    """The exit code."""
    torch.set_num_threads(1)
    theirs = load(Path(file))

    class PacelineFaultToleranceTest(theirs._make_fault_tolerance_test_class("paceline", "cpu")):  # type: ignore[misc]
        def _spawn_processes(self) -> None:
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    suite = unittest.TestSuite()
    for case in (PacelineFaultToleranceTest, theirs.ReconfigureContractTest):
        for name in unittest.TestLoader().getTestCaseNames(case):
            if not patterns or any(re.search(pattern, name) for pattern in patterns):
                suite.addTest(case(name))
    return 0 if unittest.TextTestRunner(sys.stderr, verbosity=2).run(suite).wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
