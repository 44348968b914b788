"""Run the same pipeline on Ray and on this machine: nodes of the workers, environment variables, equal results.

python examples/08_ray.py                   a private Ray on this machine, stopped at the end
python examples/08_ray.py ray:auto          the Ray cluster of this machine: after `ray start --head`, or in a Ray job
python examples/08_ray.py ray:HOST:6379     a cluster by the address of its head; this machine must be one of its nodes
"""

import os
import sys
from collections import Counter

import dovetail as dt

ENGINE = sys.argv[1] if len(sys.argv) > 1 else "ray"
os.environ["GREETING"] = "hello"  # workers on other nodes get only the variables in env_from


class Greet:
    """Created once per worker, on its node."""

    def setup(self, worker):
        self.node, self.greeting = worker.node, os.environ["GREETING"]

    def __call__(self, numbers):
        return [(number, self.node, f"{self.greeting} {number}") for number in numbers]


def square(number):
    return number * number


pipe = dt.Pipeline([dt.Stage("square", dt.each(square)), dt.Stage("greet", Greet, batch_size=50)], name="greetings")

print(f"--- on {ENGINE}")
run = dt.run(pipe, range(2000), engine=ENGINE, env_from=["GREETING"], ordered=True)
print(run.plan.cluster.spec())
there = list(run)
nodes = Counter(node for _, node, _ in there)
print(f"results by node: {dict(nodes)}")
print(f"last result: {there[-1][2]}")

print("\n--- on this machine")
here = list(dt.run(pipe, range(2000), ordered=True))
print(f"the same {len(here)} results: {[text for *_, text in there] == [text for *_, text in here]}")
