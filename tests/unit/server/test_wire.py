"""What is read from the wire goes to terminals and logs."""

import pytest

from paceline_server import ServerSettings, wire
from paceline_server.errors import BadRequest


def test_what_goes_to_terminals_and_logs_is_printable() -> None:
    assert wire.cut("\x1b[2J\nforged: line\x07 \u00fc", 2_000) == " [2J forged: line  \u00fc"
    assert len(wire.cut("\u00fc" * 5_000, 2_000).encode()) <= 2_000
    with pytest.raises(BadRequest, match="printable"):
        wire.read_address("10.0.0.1:1\x1b]0;x\x07", ServerSettings())
