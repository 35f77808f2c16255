"""Generates the stubs beside the .proto files (`make protos`); a test compares its output with what is checked in."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes `*_pb2.py`, `*_pb2.pyi`, `*_pb2_grpc.py` and `*_pb2_grpc.pyi` for every proto below `out`.

    Raises:
        SystemExit: protoc failed.
    """
    well_known = resources.files("grpc_tools") / "_proto"
    sources = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    flags = [f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    code = protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *flags, *sources])
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
