"""`paceline bench`: what a collective costs, measured between real processes.

What is computed is pure; what measures is around it:
    sizes.py       PURE: sizes as text, and as a collective needs them
    arithmetic.py  PURE: bus bandwidth, percentiles, rows
    plan.py        PURE: what is asked for, as jobs
    calls.py       each collective as one call on a group
    measure.py     times one job on a group, schedules turn about
    worker.py      a worker's script: measures all jobs, rank 0 tells the rows
    command.py     starts the workers, shows the rows
"""
