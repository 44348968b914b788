"""Scheduling: worker counts, placement, plans, replans and diagnosis. Pure."""
