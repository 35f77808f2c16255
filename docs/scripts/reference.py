"""Pages of reference that are made of the code: the command line, from typer, and the settings."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

from paceline.config import ENVIRONMENT, Config

__all__ = ["command_line", "settings"]


def command_line() -> str:
    """Returns a page with every command, those of plug-ins too, as typer writes it."""
    app = ("-m", "typer", "paceline.cli.app", "utils", "docs", "--name", "paceline", "--title", "Command line")
    return subprocess.run([sys.executable, *app], stdout=subprocess.PIPE, check=True, text=True).stdout


def settings() -> str:
    """Returns a page with every PACELINE_* variable and every field of `paceline.Config`."""
    defaults = {f"PACELINE_{field.name.upper()}": field.default for field in fields(Config)}
    lines = [
        "# Settings",
        "",
        "An argument takes precedence over a variable, a variable over the default. Timeouts are in seconds. All "
        "workers of a job need the same `PACELINE_FAILURE_TIMEOUT` and `PACELINE_TUNING`.",
        "",
        "| Variable | Meaning | Default |",
        "| --- | --- | --- |",
    ]
    for name, meaning in ENVIRONMENT.items():
        default = defaults.get(name, "")
        shown = f"`{default:g}`" if isinstance(default, float) else ""
        lines.append(f"| `{name}` | {meaning[0].upper() + meaning[1:]} | {shown} |")
    names = ", ".join(f"`{field.name}`" for field in fields(Config))
    lines += [
        "",
        f"In Python, `paceline.Config` has {names}: `paceline.join(config=paceline.Config(step_timeout=60))`.",
        "",
    ]
    return "\n".join(lines)
