"""HOW IS EACH KIND OF SOURCE READ: where its rows lie (the driver's side), and what they are (the worker's)."""
