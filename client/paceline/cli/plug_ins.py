"""Loads plug-ins. If one does not work, the user gets an error that names its package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import EntryPoint

from paceline._base.terminal import UsageError


@contextlib.contextmanager
def errors_of(point: EntryPoint) -> Iterator[None]:
    """Names the plug-in if the block, which loads or calls it, fails.

    Raises:
        UsageError: the block failed.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # it is somebody else's code
        package = f"the package {point.dist.name}" if point.dist is not None else "its package"
        raise UsageError(
            f"the plug-in {point.name!r} ({point.value}) does not work: {type(error).__name__}: {error}. Mend or "
            f"uninstall {package}"
        ) from error
