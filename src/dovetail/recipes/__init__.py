"""Recipes: lists of operators over a dataset in Data-Juicer's format, compiled to pipelines; `is_recipe`."""

RECIPE_KEYS = frozenset({"process", "dataset_path", "export_path"})
"""Each of them identifies a recipe, so that one misspelled key does not."""


def is_recipe(data: object) -> bool:
    """Whether the data of a file is a recipe, not a pipeline."""
    return isinstance(data, dict) and "stages" not in data and not RECIPE_KEYS.isdisjoint(data)
