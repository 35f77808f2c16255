"""Elastic training: the session, the loop over steps that workers may leave and join, and the state that they share."""
