"""Stores of jobs: in memory (the reference), in a SQLite file, and in Redis or Valkey."""
