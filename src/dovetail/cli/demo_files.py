"""What does the demo work on? A folder with documents, a pipeline file and its functions, to look at and run again."""

from __future__ import annotations

import json
import shlex
import tempfile
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from dovetail.cli.files import refused, write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator

PIPELINE = """\
# What `dovetail demo` ran. Run it again:  dovetail run pipeline.yaml
# Keys and their meaning: dovetail schema pipeline
name: documents
source: documents.jsonl
sink: {path: clean.jsonl, ordered: true}

stages:
  - name: clean
    run: steps:clean              # module:name; steps.py is beside this file
    resources: {cpus: 1}
  - name: judge                   # needs the same as the stage before it: both run in the same workers
    run: steps:judge
    resources: {cpus: 1}
  - name: describe
    run: steps:Describe           # a class: set up once per worker, then lists in, lists out
    resources: {cpus: 1}
    batch_size: 32
"""
DOCUMENTS, RESULTS, PIPELINE_FILE, STEPS = "documents.jsonl", "clean.jsonl", "pipeline.yaml", "steps.py"
SUBJECTS = {
    "gardens": "soil seed root leaf rain shade prune compost tomato hedge orchard frost bloom harvest spade",
    "harbours": "boat tide rope quay cargo crane pilot anchor storm lighthouse ferry net dock hull sailor",
    "kitchens": "flour salt oven knife stew onion butter yeast dough simmer taste pan recipe spice sugar",
    "planets": "orbit moon crater dust probe telescope gravity ring comet star rocket lens signal ice axis",
    "railways": "train track signal bridge station engine tunnel freight guard timetable whistle coal platform axle",
}
FILLING = "the of and to in a is that for it as was with by on not at are this have from or had an which one"


def prepared(folder: str | None, documents: int) -> Path:
    """A folder with everything in it: this one, if there is nothing of the kind in it, or a new one."""
    try:
        where = Path(tempfile.mkdtemp(prefix="dovetail-demo-") if folder is None else folder).absolute()
        where.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fix = "dovetail demo --folder /a/folder/of/yours"
        raise refused(folder or "a temporary folder", f"cannot be made: {reason}", fix) from None
    again = f"dovetail demo --folder {shlex.quote(f'{where}-2')}"
    steps = files("dovetail.cli").joinpath("demo_steps.py").read_text(encoding="utf-8")
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in generated(documents))
    for name, text in ((PIPELINE_FILE, PIPELINE), (STEPS, steps), (DOCUMENTS, rows)):
        write_atomically(str(where / name), text, fix=again, fix_if_there=again)
    return where


def generated(count: int) -> Iterator[dict[str, Any]]:
    """The same ones every time; three in ten are not worth keeping."""
    chance = Random(7)  # noqa: S311
    subjects = {name: [*words.split(), *words.split(), *FILLING.split()] for name, words in SUBJECTS.items()}
    for number in range(count):
        subject = chance.choice(list(subjects))
        yield {"id": number, "subject": subject, "text": _text(chance, subjects[subject], chance.random())}


def _text(chance: Random, words: list[str], kind: float) -> str:
    if kind < 0.1:
        return " ".join(chance.choices(words, k=chance.randint(2, 12)))
    if kind < 0.2:
        return "".join(chance.choices("#$%^&*()_+=-[]{}<>/|~ abc123", k=chance.randint(200, 600)))
    if kind < 0.3:
        return f"{' '.join(chance.choices(words, k=5))} " * chance.randint(20, 60)
    sentences = [" ".join(chance.choices(words, k=chance.randint(8, 18))).capitalize() for _ in range(20)]
    link = f" see  https://example.org/{chance.randrange(10**6)} \u00a0" if kind > 0.8 else ""
    return ".  ".join(sentences) + f".{link}"
