"""Sources, sinks and commits of a run."""
