"""Commands that say what a job's members are doing: `paceline debug flight`, `stacks` and `trace`."""
