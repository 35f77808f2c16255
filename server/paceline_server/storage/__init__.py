"""Keeps what outlives the process: an interface (`base`), implemented in memory (`memory`) and in SQLite (`sqlite`)."""
