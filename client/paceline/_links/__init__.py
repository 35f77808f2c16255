"""Ways to move bytes between two members: the contract, and the links that keep it."""
