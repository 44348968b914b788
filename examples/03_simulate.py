"""Simulate a pipeline on a hypothetical cluster: same plan, same controller, virtual time.

python examples/03_simulate.py
"""

import dovetail as dt


def work(items: list[object]) -> list[object]:
    return items


pipe = dt.Pipeline(
    [
        dt.Stage("read", work, dt.Resources(cpus=1), rate=8, fuse=False),
        dt.Stage("caption", work, dt.Resources(gpus=0.25), batch_size=16, rate=4),
        dt.Stage("embed", work, dt.Resources(gpus=1), batch_size=32, rate=24),
        dt.Stage("write", work, dt.Resources(cpus=0.5), rate=40, fuse=False),
    ],
    name="clips",
)
cluster = "4x(32cpu, 128GB, 4xL40S:48GB)"

print("--- without failures")
calm = dt.simulate(pipe, cluster, items=10_000)
print(calm)

print("\n--- with failures: a node is lost, captions take twice as long for a while, workers crash")
failures = dt.world_from_pipeline(
    pipe,
    every={"spread": dt.Lognormal(0.4), "setup_s": 10.0, "deaths_per_hour": 6.0},
    script=(
        dt.ScriptedEvent(30.0, dt.LoseNode("node-3")),
        dt.ScriptedEvent(45.0, dt.SlowDown("caption", 2.0, until_s=100.0)),
    ),
)
failing = dt.simulate(pipe, cluster, items=10_000, world=failures)
print(failing)
print(
    f"\ndelivered: {failing.delivered} of 10000 items, at {failing.rate / calm.rate:.0%} of the rate without failures"
)
