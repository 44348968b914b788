"""Plan a pipeline: number of workers, placement, rate and bottleneck, before anything starts."""

import dovetail as dt


def download(urls):
    return urls


def decode(files):
    return files


class Caption:
    def setup(self, worker): ...

    def __call__(self, clips):
        return clips


pipe = dt.Pipeline(
    [
        dt.Stage("download", dt.each(download), dt.Resources(cpus=1), rate=4),
        dt.Stage("decode", decode, dt.Resources(cpus=2, nvdecs=1), rate=6, returns=3),  # three clips per file
        dt.Stage("caption", Caption, dt.Resources(gpus=0.25, gpu_memory="4GB"), batch_size=16, rate=9),
        dt.Stage("write", print, dt.Resources(cpus=0.5), workers=2, rate=50),
    ],
    name="clips",
)
plan = dt.plan(pipe, "2x(32cpu, 128GB, 2xL40S:48GB)")
print(plan.explain())
print()
print("caption workers are placed on", sorted({(seat.node, *seat.gpus) for seat in plan.seats["caption"]}))
assert dt.Plan.from_json(plan.to_json()) == plan
