"""Collectives: schedules in pure arithmetic, the choice between them, and the engine that runs them over links."""
