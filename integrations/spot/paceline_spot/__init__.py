"""Tells `paceline run --notice` when AWS, Google Cloud or Azure will take this spot machine.

The entry points "aws", "gcp" and "azure" in the group "paceline.notices" are the functions of these names. Each asks
the machine's metadata service, or the one at PACELINE_NOTICE_URL. docs/how-to/spot-machines.md is for users.
"""

from __future__ import annotations

import os

from paceline.launch import Notice
from paceline_spot._clouds import AWS, AZURE, GCP, Metadata, Provider

__all__ = ["aws", "azure", "gcp"]


def aws() -> Notice:
    """Returns the notice of AWS, which comes 2 minutes before the end."""
    return _notice(AWS)


def gcp() -> Notice:
    """Returns the notice of Google Cloud, which comes 30 s before the end."""
    return _notice(GCP)


def azure() -> Notice:
    """Returns the notice of Azure, which comes 30 s before the end."""
    return _notice(AZURE)


def _notice(provider: Provider) -> Notice:
    return Notice(Metadata(provider, os.environ.get("PACELINE_NOTICE_URL")).ask, provider.leave_s)
