"""The job queue: data, state machine, ordering, the store port, and stores in memory, in SQLite and in Redis."""
