"""The stubs beside the .proto files are what the pinned generator makes of them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

import pacelinepb

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.filterwarnings("ignore")  # of the generator
def test_checked_in_stubs_match_the_generator_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    spec = importlib.util.spec_from_file_location("generate", ROOT / "protos" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    generator.generate(tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*_pb2*.py*")}
    kept = ROOT / "protos"
    assert made
    assert made == {
        path.relative_to(kept): path.read_text() for path in kept.rglob("*_pb2*.py*") if "__pycache__" not in path.parts
    }


def test_error_reasons_have_unique_numbers() -> None:
    from pacelinepb.v1.errors_pb2 import ErrorReason

    assert len(set(ErrorReason.values())) == len(ErrorReason.keys())
    assert (pacelinepb.OLDEST_PROTOCOL_VERSION, pacelinepb.PROTOCOL_VERSION) == (8, 9)
