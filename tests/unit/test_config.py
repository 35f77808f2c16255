"""Config: the environment's table, and what is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from paceline.config import ENVIRONMENT, Config


def test_the_environment_beats_the_defaults() -> None:
    config = Config.from_environment({"PACELINE_FAILURE_TIMEOUT": "1.5", "PACELINE_JOB": "x"})
    assert config.failure_timeout == 1.5
    assert config.step_timeout == Config().step_timeout
    assert config.heartbeat_interval == pytest.approx(0.25)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_an_invalid_timeout_variable_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)failure_timeout"):
        Config.from_environment({"PACELINE_FAILURE_TIMEOUT": text})


def test_every_config_field_has_an_environment_variable() -> None:
    assert {f"PACELINE_{field.name.upper()}" for field in fields(Config)} <= set(ENVIRONMENT)


def test_link_settings_are_read_from_the_environment() -> None:
    assert Config().links == ("shm", "tcp", "grpc")
    table = {"PACELINE_LINKS": "tcp, grpc", "PACELINE_TCP_STREAMS": "4", "PACELINE_TUNING": "table.json"}
    config = Config.from_environment({**table, "PACELINE_PINNED": "64"})
    assert (config.links, config.tcp_streams, config.tuning) == (("tcp", "grpc"), 4, "table.json")
    assert (config.pinned, Config().pinned) == (64, 512)
    drains = [Config.from_environment({"PACELINE_DRAIN_STRAGGLERS": text}).drain_stragglers for text in ("1", "0", "")]
    assert drains == [True, False, False]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("PACELINE_LINKS", "tcp,udp", "there is no kind of link 'udp'"),
        ("PACELINE_TCP_STREAMS", "many", "PACELINE_TCP_STREAMS must be a number from 1 to 16, not 'many'"),
        ("PACELINE_TCP_STREAMS", "17", "tcp_streams must be 1 to 16, not 17"),
        ("PACELINE_TCP_STREAMS", "0", "tcp_streams must be 1 to 16, not 0"),
        ("PACELINE_PINNED", "1G", "PACELINE_PINNED must be a number of MiB from 1 on, not '1G'"),
        ("PACELINE_PINNED", "0", "pinned must be at least 1 MiB, not 0"),
        ("PACELINE_DRAIN_STRAGGLERS", "yes", "PACELINE_DRAIN_STRAGGLERS must be 0 or 1, not 'yes'"),
    ],
)
def test_invalid_link_settings_are_refused_with_a_reason(name: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Config.from_environment({name: text})
