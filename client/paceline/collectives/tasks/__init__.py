"""What each collective means in terms of arrays: checked at the call, carried out later by the engine."""
