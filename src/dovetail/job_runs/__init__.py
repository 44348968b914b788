"""Pipelines, recipes, backfills and actor systems as jobs of the queue."""
