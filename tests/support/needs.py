"""Skips tests that need something beside Python which is not there, or fails them if it is required.

REQUIRE=root,etcd (values of the mark `needs`, and "fuzzing") turns these skips into failures.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

NEEDS = ("root", "etcd", "browser", "containers", "slurm", "torch", "ray", "peers")
"""Values of `pytest.mark.needs(what=...)`; each has stages in `stages.py`."""

_REQUIRED = {word.strip() for word in os.environ.get("REQUIRE", "").split(",")} - {""}

if unknown := _REQUIRED - {*NEEDS, "fuzzing"}:
    raise pytest.UsageError(f"REQUIRE names {', '.join(sorted(unknown))}; it can name {', '.join(NEEDS)} and fuzzing")


def is_required(what: str) -> bool:
    """True if REQUIRE names it."""
    return what in _REQUIRED


def missing(what: str, text: str) -> NoReturn:
    """Skips the test that runs, or fails it where `what` is required; `text` says what is not there."""
    if is_required(what):
        pytest.fail(text)
    pytest.skip(f"{text} (REQUIRE={what} makes this a failure)")
