"""Decides when a bucket may be sent while the backward pass still runs. Pure: signals in, bucket numbers out.

Two rules make it right:

- Buckets are sent in one fixed order on every rank, whatever the order of signals, because the n-th collective of one
  rank meets the n-th of every other.
- A parameter is complete once it has signalled as often as it ever did in one backward pass: a layer that runs twice
  signals twice. So the first pass sends nothing early; it counts.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Readiness"]


class Readiness:
    """Counts signals of N parameters that lie in B buckets.

    Args:
        bucket_of: number of the bucket of each parameter.
        static: every pass signals what the first one did: a parameter that is never used keeps nobody waiting.
    """

    def __init__(self, bucket_of: Sequence[int], *, static: bool = False) -> None:
        self._bucket_of = tuple(bucket_of)
        self._static = static
        self._expected = [1] * len(self._bucket_of)
        """Signals after which a parameter counts as complete. At least 1, unless `static`: one that was never used may
        be used yet."""
        self._learned = False
        """True once a whole backward pass was counted."""
        self.start(early=False)

    def start(self, *, early: bool) -> None:
        """Begins a backward pass; `early`: buckets may be sent while it runs."""
        self._early = early and self._learned
        self._seen = [0] * len(self._bucket_of)
        self._incomplete = [0] * (max(self._bucket_of, default=-1) + 1)
        for bucket, expected in zip(self._bucket_of, self._expected, strict=True):
            self._incomplete[bucket] += expected > 0
        self._sent = 0

    def may_write(self, parameter: int) -> bool:
        """Whether the parameter's bucket is still here. If not, the next pass will wait for one signal more."""
        if self._bucket_of[parameter] >= self._sent:
            return True
        self._expected[parameter] = max(self._expected[parameter], self._seen[parameter] + 1)
        return False

    def signal(self, parameter: int) -> range:
        """Counts a signal; the buckets that may now be sent, in order."""
        self._seen[parameter] += 1
        if self._early and self._seen[parameter] == self._expected[parameter]:
            self._incomplete[self._bucket_of[parameter]] -= 1
        first = self._sent
        while self._early and self._sent < len(self._incomplete) and self._incomplete[self._sent] == 0:
            self._sent += 1
        return range(first, self._sent)

    def end(self) -> None:
        """The backward pass is complete: what it counted is expected of the next."""
        if self._static and not self._learned:
            self._expected = self._seen
        else:
            self._expected = [max(pair) for pair in zip(self._expected, self._seen, strict=True)]
        self._learned = True

    def rest(self) -> range:
        """The buckets that have not been sent, in order; they count as sent from now on."""
        first, self._sent = self._sent, len(self._incomplete)
        return range(first, self._sent)
