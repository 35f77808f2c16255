"""Commands that say what a job's members are doing: `paceline debug flight`, `stacks`, `output` and `trace`."""
