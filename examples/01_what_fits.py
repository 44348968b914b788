"""Place workers on a cluster, and explain why a request does not fit."""

import dovetail as dt

cluster = dt.Cluster.parse("2x(32cpu, 128GB, 2xgpu:20GB)")
caption = dt.Resources(cpus=2, gpu_memory="1500MB").shape()
train = dt.Resources(cpus=8, gpus=1).shape()

ledger = dt.Ledger(cluster)
placer = dt.Placer(ledger, dt.FragmentationScore(dt.Workload({caption: 10, train: 2})))

for seats in placer.fill(caption, 10):
    print("caption is placed on", seats[0].node, "card", seats[0].cards[0].card)
print("train is placed on", [seats[0].node for seats in placer.fill(train, 3)])

print()
large = dt.Resources(gpu_memory="25GB").shape()
requests = [dt.WorkerRequest("one more train", train), dt.WorkerRequest("a large model", large)]
for problem in dt.find_fit_problems(requests, ledger):
    print(problem.render())
