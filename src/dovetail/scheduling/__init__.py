"""HOW MANY, AND WHERE: placement, its scores, and why something does not fit. Pure."""
