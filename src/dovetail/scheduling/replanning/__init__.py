"""How does `replan` find what to change? Who is there, what is wanted, how to seat it, and whether that pays."""
