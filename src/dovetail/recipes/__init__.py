"""A RECIPE: a list of operators over a dataset, in Data-Juicer's shape, as a pipeline."""


def is_recipe(data: object) -> bool:
    """Whether what is in a file is a recipe, and not a pipeline."""
    return isinstance(data, dict) and "process" in data and "stages" not in data
