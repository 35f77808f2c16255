"""Collectives: schedules as arithmetic, the choice among them, and the engine that runs one over links."""
