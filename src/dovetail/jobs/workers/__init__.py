"""Workers of the job queue: the loop, the runners of jobs, their processes, and cached models."""
