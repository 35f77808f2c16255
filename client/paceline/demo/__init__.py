"""What the workers of `paceline demo` do, and the state of a run as they report it. `paceline.cli.demo` shows it."""
