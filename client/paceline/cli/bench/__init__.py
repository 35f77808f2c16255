"""`paceline bench`: what a collective costs, measured between real processes.

What is computed is pure; what measures is around it:
    arithmetic.py  PURE: sizes, bus bandwidth, percentiles, rows
    measure.py     times one collective at one size on a group
    worker.py      a worker's script: measures all sizes, rank 0 tells the rows
    command.py     starts the workers, shows the rows
"""
