"""Worker of `job_queue_costs.py`: `python jobs_worker.py URL OPTIONS`, the options as JSON."""

from __future__ import annotations

import json
import sys

import dovetail as dt

RESOURCES = "64cpu, 16GB"
"""Given, so that the claim of other programs on this machine does not matter."""


def main() -> None:
    url, options = sys.argv[1], json.loads(sys.argv[2])
    queue = dt.Queue(url, if_no_worker="ignore")
    dt.Worker(queue, app=["jobs_functions"], resources=RESOURCES, **options).run(handle_signals=True)


if __name__ == "__main__":
    main()
