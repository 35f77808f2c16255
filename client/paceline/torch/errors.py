"""Errors for two kinds of readers: scripts of torch.distributed catch RuntimeError, and Paceline's users its types.

What a process group raises is both: the Paceline error, and `torch.distributed.DistBackendError` (a RuntimeError).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from paceline.errors import OperationTimeout, PacelineError

__all__ = ["for_torch", "told_to_torch"]


@functools.cache
def _both(kind: Any) -> Any:
    return type(kind.__name__, (kind, dist.DistBackendError), {"__doc__": kind.__doc__, "__module__": kind.__module__})


def for_torch(error: BaseException) -> BaseException:
    """The same error, a `DistBackendError` too if it is Paceline's."""
    if not isinstance(error, PacelineError) or isinstance(error, dist.DistBackendError):
        return error
    kind: Any = type(error)
    both = _both(kind)
    made: PacelineError = both.__new__(both)
    made.__dict__.update(error.__dict__)
    text = str(error)
    made.args = (f"{text} (the timeout of this call)" if isinstance(error, OperationTimeout) else text,)
    return made.with_traceback(error.__traceback__)


@contextmanager
def told_to_torch() -> Iterator[None]:
    """Raises what the block raises as `for_torch` has it."""
    try:
        yield
    except PacelineError as error:
        raise for_torch(error) from error.__cause__
