"""Cursors and splits for every input format."""
