"""YAML and JSON documents that remember the line and column of every value."""
