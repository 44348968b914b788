"""Run a pipeline on this machine: a stage that is a class, an item that fails, results in order.

python examples/04_run.py
"""

import json
from collections import Counter

import dovetail as dt


def parse(line):
    return json.loads(line)


class Count:
    """Created once per worker; `setup` runs before the first call."""

    def setup(self, worker):
        self.small = frozenset(["a", "and", "of", "the"])
        print(f"worker {worker.id} is ready for stage {worker.stage}")  # in the log of the worker: dovetail logs

    def __call__(self, rows):  # lists in, lists out
        return [(row["id"], Counter(word for word in row["text"].split() if word not in self.small)) for row in rows]


def commonest(counted):
    number, words = counted
    return number, words.most_common(1)[0]


lines = [json.dumps({"id": n, "text": f"the page {n} of a book and the {'end ' * (n % 3)}"}) for n in range(1000)]
lines[500] = "this is not JSON"

pipe = dt.Pipeline(
    [
        dt.Stage("parse", dt.each(parse), on_error="skip"),
        dt.Stage("count", Count, batch_size=32),
        dt.Stage("commonest", dt.each(commonest)),
    ],
    name="words",
)
plan = dt.plan(pipe, "1x(4cpu, 4GB)")  # default: this machine
print("--- the plan")
print(plan.explain())

print("\n--- results, in the order of the source")
run = dt.run(pipe, lines, plan=plan, ordered=True)
results = list(run)
print(*results[:3], sep="\n")
numbers = [number for number, _ in results]
print(f"{len(results)} results, in order: {numbers == sorted(numbers)}")

print("\n--- failed items")
for error in run.errors:
    print(f"item {error.key[0]} in stage {error.stage}, after {error.attempts} attempts: {error.error}")
    print(f"  the item: {error.item!r}")

print("\n--- summary")
print(run.stats)
