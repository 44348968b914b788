"""Recipes: lists of operators over a dataset in Data-Juicer's format, compiled to pipelines; `is_recipe`."""

RECIPE_KEYS = frozenset({"process", "dataset_path", "export_path"})
"""By which one is known, even if one of them is spelled wrongly."""


def is_recipe(data: object) -> bool:
    """Whether what is in a file is a recipe, and not a pipeline."""
    return isinstance(data, dict) and "stages" not in data and not RECIPE_KEYS.isdisjoint(data)
