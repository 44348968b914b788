"""A worker as a program of its own, for tests that kill it: `python -m jobs.worker_program URL OPTIONS`."""

from __future__ import annotations

import json
import sys

from dovetail.jobs.queue import Queue
from jobs.worker_aids import make_worker


def main() -> None:
    queue = Queue(sys.argv[1], if_no_worker="ignore")
    worker = make_worker(queue, **json.loads(sys.argv[2]))
    worker.run(handle_signals=True)
    sys.stdout.write(json.dumps(worker.get_status()))


if __name__ == "__main__":
    main()
