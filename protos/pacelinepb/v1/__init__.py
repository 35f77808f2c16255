"""Version 1 of the Paceline protocol."""
