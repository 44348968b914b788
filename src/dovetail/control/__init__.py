"""Commands, events and the engine port, and the one loop that connects a controller to an engine."""
