"""Recording of runs, and reports about them."""
