"""Without accelerate nothing here is collected (REQUIRE=torch, in stages that have it: an error)."""

from __future__ import annotations

from importlib.util import find_spec

from support.needs import is_required

collect_ignore_glob: list[str] = []
if find_spec("accelerate") is None:
    if is_required("torch"):
        raise RuntimeError("REQUIRE=torch, and accelerate is not installed")
    collect_ignore_glob = ["test_*.py"]
