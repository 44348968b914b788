"""Column backfills: fill columns of a Lance table with user functions."""
