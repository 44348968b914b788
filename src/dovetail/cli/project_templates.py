"""Files of the projects that `dovetail init` writes: data, functions, the file to run, and the commands."""

from __future__ import annotations

import json

PIPELINE_YAML = """\
# A pipeline: its stages, and the resources of ONE worker of each. Dovetail computes how many workers run, and where.
# All keys: docs/reference.md, or `dovetail schema pipeline` for an editor.
name: reviews

source: data/reviews.jsonl            # also [a.csv, b.csv], folders, globs, s3://..., {path: x, columns: [id, text]}
sink: {path: scored.jsonl, ordered: true}  # default: stdout; paths are relative to this file
max_errors: 10                        # fail the run if more items than this fail

stages:
  - name: clean
    run: steps:clean                  # module:name of a function or a class; modules in this folder can be imported
    resources: {cpus: 0.5}
    on_error: skip                    # record failed items; fail (the default) stops the run

  - name: score
    run: steps:Score                  # a class: setup() loads the model once per worker
    batch_size: 32                    # items per call
    resources: {cpus: 0.5, memory: 200MB}
    # resources: {cpus: 1, gpus: 0.25, gpu_memory: 4GB}  # a quarter of a GPU; nvdecs: 1 is a hardware decoder
    # workers: [1, 8]                 # auto (the default), a number, or [min, max]
    # rate: 40                        # items per second of one worker; default: measured
    # returns: 8                      # results per item; default: measured
    # retries: 5
    # setup_timeout: 5m               # seconds, or 90s, 5m, 1h
    # after: [clean]                  # default: the stage above; several: items of all of them
"""
PIPELINE_STEPS = '''\
"""Stages of pipeline.yaml."""

import dovetail as dt


@dt.each
def clean(row):
    """Gets one row, because of dt.each; returning None drops it."""
    text = " ".join(row["text"].lower().split())
    return {**row, "text": text} if text else None


class Score:
    """Created once in each worker. Gets a list of rows and returns a list of results."""

    def setup(self):
        self.points = {"good": 1, "great": 2, "bad": -1, "broken": -2}
        print("the model is loaded")

    def __call__(self, rows):
        return [{**row, "score": self.score(row["text"])} for row in rows]

    def score(self, text):
        return sum(self.points.get(word, 0) for word in text.split())
'''
PIPELINE_README = """\
# A pipeline

`pipeline.yaml` reads `data/reviews.jsonl`, applies the functions in `steps.py`, and writes `scored.jsonl`.

```
dovetail run pipeline.yaml --dry-run      # check code, source and sink; start nothing
dovetail run pipeline.yaml
dovetail status                           # the summary of the latest run
dovetail errors                           # failed rows; row 7 has no text
dovetail logs --stage score               # what the workers printed
dovetail plan pipeline.yaml --cluster "2x(8cpu, 32GB)"
dovetail simulate pipeline.yaml --cluster "2x(8cpu, 32GB)" --limit 1000
```

`dovetail serve pipeline.yaml --port 8000` answers requests over HTTP with the same stages.
"""

RECIPE_YAML = """\
# A recipe: operators over a dataset, in Data-Juicer's format. Dovetail computes how many workers run, and where.
# All keys: docs/recipes.md, or `dovetail schema recipe` for an editor.
project_name: clean_text

dataset_path: data/pages.jsonl          # also folders, globs, .json .csv .parquet .lance .txt, .gz and .zst
export_path: out/clean.jsonl            # or .parquet, .csv, .lance; paths are relative to this file
text_keys: text                         # the field with the text
custom_operator_paths: own_operators.py

# mode: auto                            # streaming (all operators at once), waves, sequential (one at a time)
# open_monitor: true                    # out/monitor/: resource use of each operator, with a chart
# open_tracer: true                     # out/trace/: samples of what each operator changed or dropped
# max_errors: 1000                      # fail the run if more rows than this fail

process:
  - whitespace_normalization_mapper:
  - clean_links_mapper:
  - clean_email_mapper: {repl: "<EMAIL>"}
  - text_length_filter: {min_len: 20, max_len: 100000}
  - special_characters_filter: {max_ratio: 0.4}
  - document_deduplicator: {lowercase: true}
  - count_words: {field: words}         # your own operator, in own_operators.py
  # - image_text_similarity_filter:     # on a GPU: set only the GPU memory of one worker
  #     hf_clip: openai/clip-vit-base-patch32
  #     memory: '1500MB'
"""
RECIPE_OPERATORS = '''\
"""Custom operators of recipe.yaml."""


def count_words(row, field="words"):
    """Gets a row. Returns a row, True or False (keep it or not), None, or an iterator of rows."""
    return {**row, field: len(row["text"].split())}
'''
RECIPE_README = """\
# A recipe

`recipe.yaml` reads `data/pages.jsonl`, cleans it, and writes `out/clean.jsonl`. `own_operators.py` has an operator
of its own.

```
dovetail plan recipe.yaml
dovetail run recipe.yaml
dovetail status                           # the summary of the latest run
dovetail run recipe.yaml --set process.3.min_len=40 --sink out/longer.jsonl
```
"""

BACKFILL_TABLE = '''\
"""Creates the table clips.lance from data/clips.jsonl."""

import os

import pyarrow.json

os.environ.setdefault("LANCE_LOG", "error")  # before lance is imported: it would warn that the table is new
import lance

lance.write_dataset(pyarrow.json.read_json("data/clips.jsonl"), "clips.lance", mode="overwrite", max_rows_per_file=50)
print("wrote clips.lance")
'''
BACKFILL_FUNCTIONS = '''\
"""Functions that fill columns of clips.lance. Arguments are columns; the annotations are their types."""

import dovetail as dt


@dt.udf
def words(text: str) -> int:
    return len(text.split())


@dt.udf(version="1")
def seconds_per_word(text: str, seconds: float) -> float:
    """Fails for the clips without words. A new version computes the column again."""
    return seconds / len(text.split())
'''
BACKFILL_README = """\
# A backfill

`make_table.py` creates the Lance table `clips.lance` from `data/clips.jsonl`; the functions in `functions.py` fill new
columns of it. Needs the extra `lance`: `pip install 'dovetail-ml[lance]'`.

```
python make_table.py
dovetail backfill plan clips.lance words --udf functions:words
dovetail backfill run clips.lance words --udf functions:words
dovetail backfill run clips.lance seconds_per_word --udf functions:seconds_per_word --on-error skip
dovetail backfill errors clips.lance seconds_per_word
```

Run a command again to continue after an interruption: finished rows are not computed again.
"""

ACTORS_YAML = """\
# An actor system: its roles, and the resources of ONE instance of each. All keys: docs/reference.md, or
# `dovetail schema actors` for an editor; the guide: docs/actors.md.
name: guess

roles:
  - name: trainer
    cls: players:Trainer              # module:name of a class; modules in this folder can be imported
    resources: {cpus: 0.5}
    slots: 1                          # calls that one instance executes at the same time
    after: [pool]                     # start order
    calls: [pool]                     # what its methods call and wait for: deadlocks are found before the start
    # profile: trainer                # 4 CPUs, a GPU, one slot; also rollout, trajectory_pool, data_loader, ...

  - name: pool
    cls: players:Pool
    kwargs: {size: 100}
    slots: 100
    resources: {cpus: 0.2}
    # together: train                 # in one process with the other roles of this group

  - name: rollout
    cls: players:Rollout
    workers: [1, 4]                   # as many as fit; with scale: by load
    resources: {cpus: 0.5}
    after: [trainer]
    calls: [pool]
    # scale: {signal: outstanding, target: 4}

simulate:                             # for `dovetail simulate`: who calls what, and how long it takes
  duration: 1m
  clients:
    - {call: rollout.play, callers: 4}
    - {call: trainer.step, rate: 1}
  methods:
    rollout.play: {time: 100ms, calls: [pool.put]}
    pool.put: {time: 1ms}
    trainer.step: {time: 200ms, calls: [pool.take]}
    pool.take: {time: 1ms}
"""
ACTORS_CLASSES = '''\
"""Classes of actors.yaml. An instance lives as long as the system; `setup` gets access to the other roles."""

import random


class Pool:
    """Keeps the guesses of all rollout workers until the trainer takes them."""

    def __init__(self, size):
        self.size = size
        self.guesses = []

    def put(self, guess):
        if len(self.guesses) < self.size:
            self.guesses.append(guess)

    def take(self):
        guesses, self.guesses = self.guesses, []
        return guesses


class Rollout:
    """Guesses numbers near the one that it is given; a guess is better the nearer it is to 7."""

    def setup(self, worker):
        self.pool = worker.actors.pool

    def play(self, near):
        for _ in range(10):
            guess = near + random.uniform(-1, 1)
            self.pool.one.put((guess, -abs(guess - 7))).result()


class Trainer:
    """Moves to the best guess."""

    def setup(self, worker):
        self.pool = worker.actors.pool
        self.best = (0.0, -7.0)

    def step(self):
        self.best = max([self.best, *self.pool.one.take().result()], key=lambda one: one[1])
        return self.best[0]
'''
ACTORS_MAIN = '''\
"""Launches the system of actors.yaml, calls its roles, and stops it."""

import dovetail as dt

with dt.ActorSystem.load("actors.yaml").launch() as live:  # on a cluster: launch(engine="ray:auto")
    near = 0.0
    for _ in range(15):
        live.rollout.all.play(near).result()  # every rollout worker
        near = live.trainer.one.step().result()
    print(live.status())
print(f"the best guess is {near:.0f}")
'''
ACTORS_README = """\
# Actors

`actors.yaml` declares three roles, `players.py` has their classes, and `main.py` launches them: rollout workers put
guesses into a pool, and the trainer moves to the best one.

```
dovetail plan actors.yaml
python main.py
dovetail plan actors.yaml --cluster "2x(8cpu, 32GB)"
dovetail explain actors.yaml rollout
dovetail simulate actors.yaml             # the call pattern is in the file
dovetail actors up actors.yaml --detach   # without a program that drives it
dovetail actors status
dovetail actors down
```
"""

JOBS_TASKS = '''\
"""Functions that workers may run: `dovetail worker --app tasks`."""

import random

import dovetail as dt


@dt.job(retries=2, timeout="10m")
def train(rate, epochs=20, seed=0):
    """Fit a line to noisy points by gradient descent; the result is plain data that JSON can keep."""
    job = dt.current_job()
    points = random.Random(seed)
    data = [(x / 100, 3 * x / 100 + 1 + points.gauss(0, 0.1)) for x in range(100)]
    slope = offset = 0.0
    for epoch in range(epochs):
        errors = [(slope * x + offset - y, x) for x, y in data]
        slope -= rate * 2 * sum(error * x for error, x in errors) / len(data)
        offset -= rate * 2 * sum(error for error, _ in errors) / len(data)
        loss = sum(error * error for error, _ in errors) / len(data)
        job.progress((epoch + 1) / epochs, f"epoch {epoch + 1}, loss {loss:.3f}")
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
    return {"rate": rate, "slope": round(slope, 3), "offset": round(offset, 3), "loss": round(loss, 4)}


@dt.job(isolation="thread")
def best(ids):
    """The job with the smallest loss, of those that it was submitted after."""
    with dt.Queue("sqlite:///jobs.db") as queue:
        return min((queue.get(one).result() for one in ids), key=lambda result: result["loss"])


# @dt.job(resources={"gpus": 1, "cpus": 4})     # starts where a whole GPU and 4 CPUs are free
# def infer(batch): ...
'''
JOBS_SUBMIT = '''\
"""Submits three trainings and a job that waits for them, and prints the best."""

import dovetail as dt
import tasks

with dt.Queue("sqlite:///jobs.db") as queue:      # several machines: redis://HOST:6379/0
    jobs = queue.submit_many(tasks.train, [0.01, 0.1, 0.5], kwargs={"epochs": 50})
    best = queue.submit(tasks.best, [job.id for job in jobs], after=jobs, priority="high")
    print(f"submitted {len(jobs) + 1} jobs; a worker runs them: dovetail worker --app tasks")
    print("the best:", best.result(timeout=600))
'''
JOBS_TOML = """\
# Defaults of commands in this folder; all keys: docs/configuration.md
queue = "sqlite:///jobs.db"
"""
JOBS_README = """\
# Jobs

`tasks.py` has the functions that workers may run, `submit.py` submits jobs and waits for the best result. The queue is
the file `jobs.db`, which `dovetail.toml` names.

```
dovetail worker --app tasks &             # Ctrl-C or SIGTERM drains it
python submit.py
dovetail jobs ls
dovetail jobs show last
dovetail jobs submit tasks:train rate=0.2 --priority high --wait
dovetail jobs logs last
dovetail jobs stats
curl http://127.0.0.1:8000/workers/status
```
"""


def _json_lines(rows: list[dict[str, object]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _reviews() -> str:
    texts = ("A  GOOD book", "great value, good paper", "it arrived broken", "  ", "bad   print", "Great!")
    rows: list[dict[str, object]] = [{"id": row, "text": texts[row % len(texts)]} for row in range(200)]
    rows[7] = {"id": 7, "title": "a row without text"}
    return _json_lines(rows)


def _pages() -> str:
    texts = (
        "Soil is  the ground in which   plants grow.",
        "Write to me@example.org or see https://example.org/rain for the measurements.",
        "short",
        "*** !!! ### $$$ %%% &&& *** !!! ###",
        "SOIL is the ground in which plants grow.",
    )
    return _json_lines([{"text": f"{texts[row % 5]} Page {row % 80}."} for row in range(200)])


def _clips() -> str:
    words = ("a", "street", "at", "night", "with", "rain")
    return _json_lines(
        [{"id": row, "text": " ".join(words[: row % 7]), "seconds": 0.5 * (row % 9)} for row in range(200)]
    )


def project_files(kind: str) -> dict[str, str]:
    """Path in the project -> contents."""
    if kind == "pipeline":
        return {
            "README.md": PIPELINE_README,
            "pipeline.yaml": PIPELINE_YAML,
            "steps.py": PIPELINE_STEPS,
            "data/reviews.jsonl": _reviews(),
        }
    if kind == "recipe":
        return {
            "README.md": RECIPE_README,
            "recipe.yaml": RECIPE_YAML,
            "own_operators.py": RECIPE_OPERATORS,
            "data/pages.jsonl": _pages(),
        }
    if kind == "actors":
        return {
            "README.md": ACTORS_README,
            "actors.yaml": ACTORS_YAML,
            "players.py": ACTORS_CLASSES,
            "main.py": ACTORS_MAIN,
        }
    if kind == "jobs":
        return {
            "README.md": JOBS_README,
            "dovetail.toml": JOBS_TOML,
            "tasks.py": JOBS_TASKS,
            "submit.py": JOBS_SUBMIT,
        }
    assert kind == "backfill", f"no project of kind {kind}"
    return {
        "README.md": BACKFILL_README,
        "make_table.py": BACKFILL_TABLE,
        "functions.py": BACKFILL_FUNCTIONS,
        "data/clips.jsonl": _clips(),
    }


PROJECT_KINDS = ("pipeline", "recipe", "backfill", "actors", "jobs")
FIRST_COMMANDS = {
    "actors": "python main.py",
    "jobs": "dovetail worker --app tasks",
    "pipeline": "dovetail run pipeline.yaml",
    "recipe": "dovetail run recipe.yaml",
    "backfill": "python make_table.py && dovetail backfill run clips.lance words --udf functions:words",
}
