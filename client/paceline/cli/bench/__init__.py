"""`paceline bench`: see `command`."""
