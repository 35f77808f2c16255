"""`paceline demo`: handwritten digits, real processes, a worker that is killed and replaced, and a view of it all.

    data.py        the digits, and which of them are held back
    training.py    the model and its training, for any session
    worker.py      a worker's script: trains, and tells the view how it goes
    ledger.py      PURE: which samples the steps that count were made of
    recoveries.py  PURE: how long a killed worker and a new one held up the others
    progress.py    PURE: what workers tell, folded into the state of the run
    view.py        that state as something to look at
    command.py     starts it all, and judges the result

From `paceline.demo` nothing is imported by `import paceline`.
"""
