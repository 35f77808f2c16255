"""A process of its own that says what was set for grpc when it first imported it."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["SET", "run_asked"]

ASKS = """
import json, os, sys

class Asks:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(json.dumps({key: value for key, value in os.environ.items() if key in WANTED}, sort_keys=True))
        return None

WANTED = ("GRPC_ENABLE_FORK_SUPPORT", "GRPC_DNS_RESOLVER", "GRPC_VERBOSITY")
sys.meta_path.insert(0, Asks())
"""

SET = '{"GRPC_DNS_RESOLVER": "native", "GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}\n'
"""What it says, if Paceline has set grpc up."""


def run_asked(code: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs code without the variables that this process has for grpc and Paceline."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GRPC_", "PACELINE_"))}
    command = [sys.executable, "-c", ASKS + code]
    return subprocess.run(command, env=clean | more, capture_output=True, text=True, check=True)
