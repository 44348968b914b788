"""WHO REALLY DOES IT: implementations of the engine port. `simulated` needs nothing but virtual time."""
