"""Every test has a stack dump on a hang (pytest-timeout), and a check that it leaves no thread behind."""

from __future__ import annotations

from support.every_test import (
    no_leaked_threads,
    private_flight_records,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
)

__all__ = [
    "no_leaked_threads",
    "private_flight_records",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
]
