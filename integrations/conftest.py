"""Tests of plug-ins get what every test gets."""

from __future__ import annotations

from support.every_test import no_leaked_threads, private_flight_records

__all__ = ["no_leaked_threads", "private_flight_records"]
