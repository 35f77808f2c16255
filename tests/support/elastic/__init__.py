"""Elastic training in real processes, with faults declared in words, and what must be true of it afterwards."""
