"""What is read from the wire goes to terminals and logs."""

from typing import Any

import pytest

from paceline_protocol import Counters
from paceline_server import ServerSettings, wire
from paceline_server.errors import BadRequest
from pacelinepb.v1 import session_pb2 as pb


def test_unprintable_characters_are_replaced_or_refused() -> None:
    assert wire.cut("\x1b[2J\nforged: line\x07 \u00fc", 2_000) == " [2J forged: line  \u00fc"
    assert len(wire.cut("\u00fc" * 5_000, 2_000).encode()) <= 2_000
    with pytest.raises(BadRequest, match="printable"):
        wire.read_address("10.0.0.1:1\x1b]0;x\x07", ServerSettings())


def test_the_end_of_the_output_of_a_process_is_kept_without_control_characters() -> None:
    assert wire.read_output("a\tb\n\x1b[31mred\x00\r\n\u202e\u00fc") == "a\tb\n[31mred \n\u00fc"
    long = wire.read_output("begin " + "\u00fc" * 5_000 + " end")
    assert len(long.encode()) <= 2_000
    assert long.endswith("\u00fc end")
    assert wire.read_output("") == ""


def test_heartbeat_counters_and_progress_round_trip() -> None:
    beat = pb.Heartbeat(committed=3, undone=1, samples=64, sent_bytes={"shm": 7, "tcp": 0}, operation=1, inside=True)
    beat.in_collectives.FromMilliseconds(1500)
    beat.MergeFrom(pb.Heartbeat(checkpoint_step=100, checkpoints=2, checkpoint_failures=1))
    beat.checkpoint_time.FromMilliseconds(800)
    beat.state_bytes = 4096
    beat.state_time.FromMilliseconds(250)
    beat.speed, beat.share = 812.5, 0.25
    beat.MergeFrom(pb.Heartbeat(total=1000, logged={"loss": 0.5}, cpu=1.5, memory=1 << 30))
    beat.doing = "all_reduce\x1b[2J" + "x" * 100
    counters = wire.read_counters(beat)
    said: dict[str, Any] = {"total": 1000, "logged": {"loss": 0.5}, "cpu": 1.5, "memory": 1 << 30}
    assert counters == Counters(3, 1, 64, {"shm": 7, "tcp": 0}, 1.5, 100, 2, 1, 0.8, 4096, 0.25, 812.5, 0.25, **said)
    progress = wire.read_progress(0.0, beat)
    assert progress.doing.startswith("all_reduce [2J")
    assert len(progress.doing) == 64
    told = wire.write_progress(0.0, progress, counters)
    assert (told.samples, dict(told.sent_bytes), told.doing) == (64, {"shm": 7, "tcp": 0}, progress.doing)
    assert (told.checkpoint_step, told.checkpoints, told.checkpoint_failures) == (100, 2, 1)
    assert told.checkpoint_time == beat.checkpoint_time
    assert (told.state_bytes, told.state_time) == (4096, beat.state_time)
    assert (told.speed, told.share) == (812.5, 0.25)
    assert (told.total, dict(told.logged), told.cpu, told.memory) == (1000, {"loss": 0.5}, 1.5, 1 << 30)


@pytest.mark.parametrize("odd", [-1.0, float("nan"), float("inf"), 1e30])
def test_impossible_speeds_and_shares_count_as_not_known(odd: float) -> None:
    counters = wire.read_counters(pb.Heartbeat(speed=odd, share=odd, cpu=odd))
    assert (counters.speed, counters.share, counters.cpu) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "beat",
    [
        pb.Heartbeat(samples=1 << 62),
        pb.Heartbeat(checkpoint_step=1 << 62),
        pb.Heartbeat(state_bytes=1 << 62),
        pb.Heartbeat(checkpoints=1 << 62),
        pb.Heartbeat(checkpoint_failures=1 << 62),
        pb.Heartbeat(sent_bytes={"shm": 1 << 62}),
        pb.Heartbeat(total=1 << 62),
        pb.Heartbeat(memory=1 << 62),
        pb.Heartbeat(logged={"": 1.0}),
        pb.Heartbeat(logged={"é" * 33: 1.0}),
        pb.Heartbeat(logged={f"name{number}": 1.0 for number in range(33)}),
        pb.Heartbeat(sent_bytes={"": 1}),
        pb.Heartbeat(sent_bytes={'shm",job="x': 1}),
        pb.Heartbeat(sent_bytes={"k" * 17: 1}),
        pb.Heartbeat(sent_bytes={f"kind{number}": 1 for number in range(9)}),
    ],
)
def test_invalid_counters_are_refused(beat: pb.Heartbeat) -> None:
    with pytest.raises(BadRequest):
        wire.read_counters(beat)
