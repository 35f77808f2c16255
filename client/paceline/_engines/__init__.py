"""Engines: other libraries that carry gradients between the members of one generation."""
