"""Actor systems: long-lived roles that are declared, planned, launched, called and scaled; `is_actors_file`."""


def is_actors_file(data: object) -> bool:
    """Whether the data of a file describes an actor system, not a pipeline or a recipe."""
    return isinstance(data, dict) and "roles" in data and "stages" not in data
