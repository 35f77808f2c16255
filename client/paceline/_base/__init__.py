"""The foundation of the library: addresses, calls, waits, arrays, work. Nothing here knows of groups."""
