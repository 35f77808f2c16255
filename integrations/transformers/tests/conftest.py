"""Without transformers nothing here is collected (REQUIRE=torch, in stages that have it: an error).

TRL is only in the environment with the newest transformers.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from support.needs import is_required

collect_ignore_glob: list[str] = []
if find_spec("transformers") is None:
    if is_required("torch"):
        raise RuntimeError("REQUIRE=torch, and transformers is not installed")
    collect_ignore_glob = ["test_*.py"]
elif find_spec("trl") is None:
    if is_required("torch") and not version("transformers").startswith("5.4."):
        raise RuntimeError("REQUIRE=torch, and TRL is not installed beside the newest transformers")
    collect_ignore_glob = ["test_sft.py"]
