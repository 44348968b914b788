"""Engines: implementations of the engine port (simulated, local processes, Ray) and the worker-side code they share."""
