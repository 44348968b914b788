"""Tests of runs as jobs."""
