"""Real processes on one machine: the embedded default."""
