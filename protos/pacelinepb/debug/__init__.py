"""Reads members' answers to an operator's questions and puts them together, for the commands and the page alike.

Pure, but for apart.py, whose `main` is a process.

gathered.py        the answers of a job's members, and their flight records as a trace
records.py         a flight record
clocks.py          how far the members' clocks are ahead
chrome_trace.py    a trace for Perfetto
stack_answers.py   stacks of processes
folding.py         stacks taken apart, and folded
output_answers.py  the last lines of workers' output
apart.py           all of this in a process of its own, for the page
"""
