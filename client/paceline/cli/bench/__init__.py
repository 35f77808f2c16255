"""`paceline bench`: what a collective costs, measured between real processes, beside what others take for it.

What is computed is pure; what measures is around it:
    sizes.py       PURE: sizes as text, and as a collective needs them
    arithmetic.py  PURE: bus bandwidth, percentiles, rows
    plan.py        PURE: what is asked for, as jobs
    values.py      PURE: what ranks put in, and must get
    measure.py     PURE: one job in all contenders, turn and turn about
    tune.py        PURE: a table of rules from what was measured
    calls.py       each collective as one call on a group
    rank.py        a rank's side: sleeps until it has its turn, and times calls
    worker.py, gloo.py, openmpi.py    the ranks of each implementation, as processes
    recipes.py     how to start each of them
    ensemble.py    the conductor's side: speaks with all ranks of a contender
    stage.py       starts all contenders, and ends them
    view.py, plot.py    what people see
    command.py     the command
"""
