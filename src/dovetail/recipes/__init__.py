"""A RECIPE: a list of operators over a dataset, in Data-Juicer's shape, as a pipeline."""
