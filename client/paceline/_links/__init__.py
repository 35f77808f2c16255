"""Links, which move bytes between two members: their contract, and the kinds that implement it."""
