"""Microbatches of a step: the same bits on any number of workers, repair, checks, receipts (docs/decisions/28)."""
