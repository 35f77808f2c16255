"""`paceline bench`; `command.py` describes the modules."""
