"""What the rest of the library stands on: addresses, calls, waits, arrays, work; nothing here knows of groups."""
