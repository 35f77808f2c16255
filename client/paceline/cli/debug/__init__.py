"""Commands that say what a job's members are doing: `paceline flight`, `stacks` and `trace`."""
