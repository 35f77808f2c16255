"""Has glibc write long copies past the caches.

A copy of tens of MiB that goes through the caches reads each line of its target before it writes it, and throws out
what is there. Where another core has just read those lines it waits for that core, too. glibc streams copies from a
threshold on, which it takes from the size of the last cache: glibc 2.36 finds 320 MiB on an AMD EPYC whose core
complexes have 32, so that it streams from 240 MiB on.

The threshold is read once, as a program starts: whoever starts a worker says it.

Source: manual of the GNU C Library, "Hardware Capability Tunables".
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.links.staging import STREAMED_BYTES

__all__ = ["streaming_variables"]

_TUNABLES = "GLIBC_TUNABLES"
_THRESHOLD = "glibc.cpu.x86_non_temporal_threshold"


def streaming_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables for a program that is to be started; none if its user has set the threshold.

    Copies of long frames stream, unless they are made in halves, and those of others stay in the caches; the program's
    own copies of that length stream too. Elsewhere than on glibc and x86 it says nothing to anyone.

    Args:
        environ: what it would find otherwise; other tunables stay.
    """
    tunables = environ.get(_TUNABLES, "")
    if _THRESHOLD in tunables:
        return {}
    return {_TUNABLES: ":".join(filter(None, (tunables, f"{_THRESHOLD}={STREAMED_BYTES}")))}
