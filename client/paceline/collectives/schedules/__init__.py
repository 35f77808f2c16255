"""Schedules, one file for each thing that a collective can do: reduce, gather, spread, wait."""
