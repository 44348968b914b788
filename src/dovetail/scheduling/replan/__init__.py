"""Replan of a running pipeline: snapshot in, workers to start and stop out. Pure."""
