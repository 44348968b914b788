"""The job queue: state machine, stores, submission, workers and their simulation; `is_job_simulation`."""


def is_job_simulation(data: object) -> bool:
    """Whether the data of a file describes a queue of jobs to simulate, not a pipeline, a recipe or actors."""
    return isinstance(data, dict) and "jobs" in data and not data.keys() & {"stages", "roles", "process"}
