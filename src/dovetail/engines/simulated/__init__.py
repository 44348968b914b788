"""Simulated engine: the engine port in virtual time, for a hypothetical cluster described by a World."""
