"""The least that a worker on Redis can do: `python jobs_brpop.py PORT KEY` waits with BRPOP and reports each value."""

from __future__ import annotations

import sys

import redis

from job_worker import send_stamp


def main() -> None:
    port, key = int(sys.argv[1]), sys.argv[2]
    client = redis.Redis(port=port)
    while True:
        found = client.brpop([key], timeout=2)
        if found is not None:
            send_stamp(float(found[1]))


if __name__ == "__main__":
    main()
