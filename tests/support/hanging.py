"""A file that hangs whoever reads it, as one on a network that is away does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["hanging"]


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """In the place of a file, for the block; then the file is there again, and whoever hangs goes on."""
    content, mode = path.read_bytes(), path.stat().st_mode & 0o777
    fifo, other = path.with_name(f"{path.name}.fifo"), path.with_name(f"{path.name}.new")
    os.mkfifo(fifo)
    os.link(fifo, other)
    other.replace(path)
    try:
        yield
    finally:
        other.touch(mode)
        other.write_bytes(content)
        other.replace(path)
        with suppress(OSError):  # nobody reads it
            os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        fifo.unlink()
