"""The workers of `paceline demo`, and the state of a run as they report it. `paceline.cli.demo` shows it."""
