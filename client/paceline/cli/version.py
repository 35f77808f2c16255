"""`paceline version`: prints what a report of a problem needs."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from paceline.cli.output import print_json
from paceline_protocol import OURS
from pacelinepb import __version__

_PACKAGES = ("grpcio", "protobuf", "numpy", "torch", "accelerate", "lightning", "transformers", "ray", "mpi4py")


def show_versions(*, as_json: bool) -> None:
    """Prints the versions of Paceline, its protocol, Python, the system, and packages that are installed."""
    found = {
        "paceline": __version__,
        "protocol": f"{OURS.oldest} to {OURS.newest}",
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if as_json:
        print_json(found)
    else:
        width = max(map(len, found))
        print("\n".join(f"{name:{width}}  {value}" for name, value in found.items()))
