"""Load, check, plan and run a recipe from Python, with custom operators, a row that fails, and traces.

python examples/09_recipe.py

The recipe is recipes/clean_text.yaml; its custom operators are in recipes/own_operators.py. On the command line:
dovetail plan examples/recipes/clean_text.yaml; dovetail run examples/recipes/clean_text.yaml.
"""

import json
import tempfile
from pathlib import Path

import dovetail as dt

RECIPES = Path(__file__).resolve().parent / "recipes"
MACHINE = "1x(32cpu, 128GB, 2xgpu:20GB)"

with tempfile.TemporaryDirectory() as name:
    here = Path(name)
    print("--- a file with errors: all at once, with line and column")
    wrong = here / "wrong.yaml"
    wrong.write_text("process:\n  - text_lenght_filter: {min_len: 50}\n  - words_num_filter: {min_num: many}\n")
    try:
        dt.Recipe.load(wrong)
    except dt.PipelineError as error:
        print(str(error).replace(name, "..."))

    print("\n--- a recipe that does not fit")
    try:
        dt.Recipe.load(RECIPES / "failing_config.yaml").plan(MACHINE)
    except dt.InfeasibleError as error:
        print(error.problems[0].message)
    plan = dt.Recipe.load(RECIPES / "failing_config.yaml").plan(MACHINE, mode="sequential")
    print(f"sequential: {len(plan.waves)} waves, {plan.workers['image_maniqa_filter']} workers of image_maniqa_filter")

    print("\n--- a recipe that sets only the memory of each operator")
    plan = dt.Recipe.load(RECIPES / "optimized_config.yaml").plan(MACHINE)
    for operator, seats in plan.seats.items():
        cards = [card for seat in seats for card in seat.gpus]
        print(f"{operator}: {cards.count(0)} workers on card 0, {cards.count(1)} on card 1")

    print("\n--- a run")
    changes = ["open_tracer=true", "trace_num=1", "op_list_to_trace=[clean_email_mapper]", f"work_dir={here}"]
    recipe = dt.Recipe.load(RECIPES / "clean_text.yaml", sets=changes, sink=str(here / "clean.jsonl"))
    summary = recipe.run()
    print(f"{summary.finished} of {summary.read} rows done, {summary.delivered} out, {summary.failed} failed")
    for line in (Path(summary.folder) / "errors" / "errors.jsonl").read_text(encoding="utf-8").splitlines():
        error = json.loads(line)
        print(f"row {error['key'][0]}, {error['stage']}: {error['error']}: {error['message']}")

    print("\n--- results and traces")
    rows = [json.loads(line) for line in (here / "clean.jsonl").read_text(encoding="utf-8").splitlines()]
    print(f"in the order of the input: {[row['id'] for row in rows] == sorted(row['id'] for row in rows)}")
    print(f"row {rows[0]['id']} has {rows[0]['length']} words, counted by count_words of own_operators.py")
    trace = json.loads((here / "trace" / "sample_trace-clean_email_mapper.jsonl").read_text(encoding="utf-8"))
    for key in ("original_text", "processed_text"):
        start = trace[key].index("Write to")
        print(f"{key}: ...{trace[key][start : start + 30]}...")
