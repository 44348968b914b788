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
cluster = "8x(32cpu, 128GB, 4xL40S:48GB)"

print("--- a quiet day")
quiet = dt.simulate(pipe, cluster, items=40_000)
print(quiet)

print("\n--- a bad day: a node is lost, captions take twice as long for a while, workers die")
bad_day = dt.world_from_pipeline(
    pipe,
    every={"spread": dt.Lognormal(0.4), "setup_s": 10.0, "deaths_per_hour": 6.0},
    script=(
        dt.ScriptedEvent(60.0, dt.LoseNode("node-3")),
        dt.ScriptedEvent(90.0, dt.SlowDown("caption", 2.0, until_s=200.0)),
    ),
)
bad = dt.simulate(pipe, cluster, items=40_000, world=bad_day)
print(bad)
print(f"\nevery item came out: {bad.delivered} of 40000, at {bad.rate / quiet.rate:.0%} of the quiet day's rate")
