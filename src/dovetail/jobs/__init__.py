"""The job queue: submission, and the decisions that all stores share.

`stores/` has the stores, `workers/` the workers, `simulated/` the simulation.
"""


def is_job_simulation(data: object) -> bool:
    """Whether the data of a file describes a queue of jobs to simulate, not a pipeline, a recipe or actors."""
    return isinstance(data, dict) and "jobs" in data and not data.keys() & {"stages", "roles", "process"}
