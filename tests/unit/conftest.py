"""Settings of the unit tests."""

from hypothesis import settings

# How long an example takes says something of the machine, and nothing of the code.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
