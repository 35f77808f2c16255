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
def test_a_variable_that_is_no_time_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)failure_timeout"):
        Config.from_environment({"PACELINE_FAILURE_TIMEOUT": text})


def test_every_field_is_in_the_table() -> None:
    assert {f"PACELINE_{field.name.upper()}" for field in fields(Config)} <= set(ENVIRONMENT)
