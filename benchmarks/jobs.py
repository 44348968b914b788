"""Command of the benchmark in `job_queue_costs.py`. In tests, `jobs` is the folder tests/jobs."""

from job_queue_costs import main

if __name__ == "__main__":
    main()
