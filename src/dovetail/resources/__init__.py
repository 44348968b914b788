"""Resource model: what one worker needs, what a cluster has, and which worker holds what."""
