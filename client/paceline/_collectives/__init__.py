"""Collectives: schedules as pure arithmetic, the choice among them, and the engine that runs them over links."""
