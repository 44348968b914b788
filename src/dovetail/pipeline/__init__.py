"""Pipelines: stages, the graph they form, the units that share workers, and pipeline files."""
