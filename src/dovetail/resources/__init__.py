"""WHAT THERE IS: what one worker needs, what a cluster has, and who sits where. Pure."""
