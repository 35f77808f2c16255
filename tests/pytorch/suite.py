"""Runs PyTorch's own tests of torch.distributed, which its wheel has, on a backend; one world size in each process.

    python suite.py paceline 2 [PATTERN ...]        # the last line is JSON: the tests by how they ended

Processes are forked from this one, which has loaded torch and Paceline and has no thread: else each would take seconds.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unittest
from typing import Any
from unittest import mock

BACKEND, WORLD, PATTERNS = sys.argv[1], sys.argv[2], sys.argv[3:]


class AlsoGloo(str):
    """A backend's name that also passes for "gloo" where a test asks if its backend can do what Gloo can."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


os.environ.update(BACKEND=BACKEND, WORLD_SIZE=WORLD, TEMP_DIR=os.environ.get("TMPDIR", "/tmp"), OMP_NUM_THREADS="1")
# The suite sets it when a group is there already, whose gRPC reads the environment in other threads. A new name makes
# glibc move all of them, and a read just then dies of SIGSEGV in getenv; one that is there is replaced where it is.
os.environ["TORCH_SHOW_CPP_STACKTRACES"] = "1"

import torch  # noqa: E402  the suite reads its settings when it is loaded
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

for feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature[feature].add(BACKEND)
with mock.patch.object(os, "environ", {**os.environ, "BACKEND": AlsoGloo(BACKEND)}):
    from torch.testing._internal.distributed import distributed_test as theirs
torch.set_num_threads(1)
if BACKEND == "paceline":
    import paceline.torch.backend  # noqa: F401
    import paceline_server.app  # noqa: F401  of the coordinator that rank 0 starts


class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
    """PyTorch's tests, in forked processes."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


def main() -> int:
    names = unittest.TestLoader().getTestCaseNames(Suite)
    chosen = [name for name in names if not PATTERNS or any(re.search(pattern, name) for pattern in PATTERNS)]
    result = unittest.TextTestRunner(sys.stderr, verbosity=2).run(unittest.TestSuite(map(Suite, chosen)))
    ended: dict[str, Any] = {
        "failed": sorted(case.id().rpartition(".")[2] for case, _ in [*result.failures, *result.errors]),
        "skipped": sorted(case.id().rpartition(".")[2] for case, _ in result.skipped),
    }
    ended["passed"] = sorted(set(chosen) - {*ended["failed"], *ended["skipped"]})
    sys.stdout.write(json.dumps(ended) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
