"""What a test needs beside Python: where it is missing, the test is skipped, or fails if it is required.

REQUIRE=root,etcd (names of the mark `needs`, and "fuzzing") turns these skips into failures.
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def is_required(what: str) -> bool:
    """True if REQUIRE names it."""
    return what in os.environ.get("REQUIRE", "").split(",")


def missing(what: str, text: str) -> NoReturn:
    """Skips the test that runs, or fails it where `what` is required; `text` says what is not there."""
    if is_required(what):
        pytest.fail(text)
    pytest.skip(f"{text} (REQUIRE={what} makes this a failure)")
