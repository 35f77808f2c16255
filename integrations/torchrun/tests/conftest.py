"""Where torch is not installed, nothing here is collected (REQUIRE_TORCH=1: an error)."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob: list[str] = []
if find_spec("torch") is None:
    if os.environ.get("REQUIRE_TORCH") == "1":
        raise RuntimeError("REQUIRE_TORCH=1, and torch is not installed")
    collect_ignore_glob = ["test_*.py"]
