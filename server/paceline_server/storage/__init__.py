"""What outlives the process: an interface (`base`), kept in memory (`memory`) or in a SQLite file (`sqlite`)."""
