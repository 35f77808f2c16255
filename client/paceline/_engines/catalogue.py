"""The engines that there are, by name; each is imported when it is first used.

To add an engine: write a `DataEngine` (`data_engine.py` is its contract), name it here and in `config.ENGINES`, and run
`paceline.testing.check_engine` over it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple

from paceline._engines.data_engine import DataEngine
from paceline.config import know_engine
from paceline.errors import LinkUnavailable

__all__ = ["make_engine", "package_of", "register", "unregister"]


class _Entry(NamedTuple):
    """How an engine is made, the package that it needs, and which build of it if that matters."""

    make: Callable[[], DataEngine]
    package: str
    build: str = ""


def _imported(module: str, name: str) -> Callable[[], DataEngine]:
    """Returns a function that makes an object of a class, which it imports first."""

    def make() -> DataEngine:
        engine: DataEngine = getattr(importlib.import_module(module), name)()
        return engine

    return make


_DEVICES = "paceline.torch._device_engines"

_entries = {
    "gloo": _Entry(_imported("paceline.torch._gloo_engine", "GlooEngine"), "torch"),
    "mpi": _Entry(_imported("paceline._engines.mpi_engine", "MpiEngine"), "mpi4py"),
    "nccl": _Entry(_imported(_DEVICES, "NcclEngine"), "torch", "torch for CUDA on a machine with a GPU"),
    "ucc": _Entry(_imported("paceline.torch._ucc_engine", "UccEngine"), "torch", "torch that is built with USE_UCC=1"),
    "xccl": _Entry(_imported(_DEVICES, "XcclEngine"), "torch", "torch for Intel GPUs on a machine with one"),
}


def register(name: str, make: Callable[[], DataEngine], package: str = "") -> None:
    """Makes an engine known under a name, for `Config.engine`.

    Args:
        name: its name.
        make: makes one engine, for one group in one generation.
        package: what has to be installed for it.
    """
    _entries[name] = _Entry(make, package)
    know_engine(name)


def unregister(name: str) -> None:
    """Undoes `register`."""
    del _entries[name]
    know_engine(name, known=False)


def package_of(name: str) -> str:
    """Returns the package that an engine needs; empty for "links", and for an engine that needs none."""
    return _entries[name].package if name in _entries else ""


def make_engine(name: str) -> DataEngine:
    """Makes an engine, which is not open yet.

    Raises:
        LinkUnavailable: its package is not installed; the text names it.
    """
    entry = _entries[name]
    try:
        return entry.make()
    except ImportError as error:
        wanted = entry.build or entry.package
        text = f"the engine {name!r} cannot be used, because {error}: install {wanted}, or name no engine"
        raise LinkUnavailable(text) from error
