"""Local training in tests: the problem, a reference that shares no code with the library, and a worker."""
