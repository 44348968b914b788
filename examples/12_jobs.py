"""Jobs: a queue in a file, a worker, priorities, progress, retries and dependencies. Each job trains a small model.

python examples/12_jobs.py          everything in one program; the queue is jobs.db in the current folder

The same queue from the command line, also while the program runs:

    export DOVETAIL_QUEUE=sqlite:///jobs.db
    dovetail jobs ls
    dovetail jobs watch
    dovetail worker --app examples/12_jobs.py         a worker in a process of its own
"""

import time

import numpy as np

import dovetail as dt

# --- functions that workers may run: those with @dt.job


@dt.job(retries=1)
def train(hidden, rate, epochs=4000, seed=0):
    """Train a network with one hidden layer to separate two spirals; the result is plain data."""
    random = np.random.default_rng(seed)
    points, labels = spirals(random)
    first, second = random.normal(0, 1.5, (3, hidden)), random.normal(0, 0.3, hidden)
    velocity = [np.zeros_like(first), np.zeros_like(second)]
    job = dt.current_job()
    for epoch in range(epochs):
        inside = np.tanh(points @ first)
        guess = 1 / (1 + np.exp(-inside @ second))
        error = (guess - labels) / len(labels)
        behind = np.outer(error, second) * (1 - inside**2)
        velocity = [
            0.9 * old - rate * new for old, new in zip(velocity, (points.T @ behind, inside.T @ error), strict=True)
        ]
        first, second = first + velocity[0], second + velocity[1]
        if epoch % 200 == 0 or epoch == epochs - 1:
            accuracy = float(((guess > 0.5) == labels).mean())
            job.progress((epoch + 1) / epochs, f"epoch {epoch}, accuracy {accuracy:.2f}")
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")  # `dovetail jobs logs` shows it
    return {"hidden": hidden, "rate": rate, "accuracy": round(accuracy, 3)}


@dt.job(retries={"error": 1, "backoff": "10ms"})
def without_data():
    raise FileNotFoundError("no data")


@dt.job(isolation="thread")  # short, so it needs no process of its own
def compare(ids, queue_url):
    """Runs when all trainings have succeeded."""
    with dt.Queue(queue_url) as queue:
        return max((queue.get(one).result() for one in ids), key=lambda one: one["accuracy"])


def spirals(random, count=400):
    turns = np.linspace(0.4, 2.6, count)
    label = np.arange(count) % 2
    angle = np.pi * (turns + label)
    spiral = np.stack([turns * np.cos(angle), turns * np.sin(angle)], axis=1) + random.normal(0, 0.08, (count, 2))
    return np.column_stack([spiral, np.ones(count)]), label


# --- the program


def main():
    url = "sqlite:///jobs.db"  # several machines: redis://HOST:6379/0
    with dt.Queue(url) as queue:
        grid = [(hidden, rate) for hidden in (4, 32) for rate in (0.3, 2.0)]
        trainings = queue.submit_many(train, grid, keys=[f"train-{hidden}-{rate}" for hidden, rate in grid])
        again = queue.submit(train, 4, 0.3, key="train-4-0.3")
        print(f"{len(trainings)} trainings; the same key gives the same job: {again == trainings[0]}")
        best = queue.submit(compare, [job.id for job in trainings], url, after=trainings)
        broken = queue.submit(without_data, priority="low")
        urgent = queue.submit(train, 8, 1.0, epochs=300, priority="high")
        try:
            queue.submit(train, 4, rte=0.1)
        except dt.ConfigError as error:
            print(error)

        print("\n--- a worker with two slots")
        # progress is reported once per third of a lease; the default is 15 s
        with dt.Worker(queue, app=[__file__], slots=2, resources="2cpu, 2GB", lease="1s") as worker:
            while not best.status.is_finished:
                running = [job.snapshot for job in queue.list(state="leased")]
                for job in sorted(running, key=lambda one: one.id):
                    if job.message:
                        print(f"{job.progress:4.0%}  {job.message}")
                time.sleep(0.2)
            broken.wait(timeout=60)
            status = worker.get_status()
        print(f"active jobs: {status['active_jobs']}, available slots: {status['available_slots']}")

        print("\n--- results")
        for job in trainings:
            print(job.result())
        print("the best:", best.result())
        started = {job.id: job.attempts[0].started_ms for job in (urgent, *trainings)}
        print("the urgent job, submitted last, started first:", min(started.values()) == started[urgent.id])
        print("output of a training:", len(trainings[0].logs().splitlines()), "lines")

        [dead] = queue.dead()
        outcomes = [f"{attempt.outcome}: {attempt.error}" for attempt in dead.attempts]
        print(f"dead letter {dead.record().spec.function.rpartition(':')[2]}: {outcomes}")
        print("requeued:", queue.requeue(dead))
        print("removed:", queue.purge(older_than=0).jobs, "finished jobs")


if __name__ == "__main__":
    main()
