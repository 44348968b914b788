"""docs/actors.md: its examples run and print what is shown, and its tables are true."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import dovetail as dt
from command import like_a_process, run_command, text_of
from dovetail.actors.role_profiles import PROFILES

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "actors.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
CLUSTERS = {
    "small": "1x(16cpu, 64GB, 1xA100)",
    "medium": "4x(32cpu, 128GB, 2xA100)",
    "large": "8x(32cpu, 256GB, 8xA100){pool=gpu} + 16x(32cpu, 128GB){pool=cpu}",
}


def test_python_of_the_guide_prints_what_it_shows() -> None:
    names: dict[str, object] = {"__name__": "guide"}
    shown = 0
    for number, (language, text) in enumerate(BLOCKS):
        if language != "python" or "launch(" in text or "live" in text:
            continue  # what starts processes is tested where launches are
        out = StringIO()
        with redirect_stdout(out):
            exec(compile(text, "docs/actors.md", "exec"), names)
        if out.getvalue():
            assert (out.getvalue(), "") == (BLOCKS[number + 1][1], BLOCKS[number + 1][0])
            shown += 1
    assert shown >= 4


@pytest.mark.processes
def test_the_program_of_the_guide_launches_and_calls(tmp_path: Path) -> None:
    number, program = next((number, text) for number, (_, text) in enumerate(BLOCKS) if text.startswith("# program.py"))
    (tmp_path / "program.py").write_text(program)
    with like_a_process(tmp_path, DOVETAIL_HOME=str(tmp_path / "home"), DOVETAIL_CLUSTER="1x(2cpu, 4GB)") as (out, _):
        runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")
        assert text_of(out) == BLOCKS[number + 1][1]


def planning_commands() -> list[tuple[str, list[str]]]:
    """Commands that start nothing, with the lines shown below them."""
    found: list[tuple[str, list[str]]] = []
    for language, text in BLOCKS:
        lines = text.splitlines() if language == "" and text.startswith("$ dovetail") else ()
        for line in lines:
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
    return [one for one in found if one[0].split()[1] in ("plan", "explain", "simulate")]


@pytest.mark.parametrize(("command", "shown"), planning_commands(), ids=lambda one: one[:40] if one else "")
def test_commands_of_the_guide_print_what_it_shows(command: str, shown: list[str], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "actors", tmp_path / "examples" / "actors")
    (tmp_path / "actors.yaml").write_text(next(text for language, text in BLOCKS if language == "yaml"))
    done = run_command(*shlex.split(command)[1:], cwd=tmp_path, DOVETAIL_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    parts = "\n".join(shown).split("\n...\n")
    assert done.stdout.startswith(parts[0])
    place = 0
    for part in parts:
        place = done.stdout.index(part.removesuffix("\n..."), place)


def test_there_are_commands_in_the_guide() -> None:
    assert len(planning_commands()) >= 5


def test_the_table_of_profiles_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (\d+) \| ", GUIDE, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(PROFILES)
    for name, needs, slots in rows:
        profile = PROFILES[name]
        assert int(slots) == profile.slots
        assert sorted(needs.split(", ")) == sorted(profile.resources.shape().describe().split(", "))


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_sums_of_the_examples_are_right(name: str) -> None:
    row = re.search(rf"^\| {name} \| (\d+) \| (\d+) \| (\d+) \| (\d+) of (\d+) \|$", GUIDE, re.MULTILINE)
    assert row is not None
    loaded = dt.ActorSystem.load(ROOT / "examples" / "actors" / f"{name}.yaml")
    plan = loaded.plan(CLUSTERS[name])
    total = sum(node.cpu_milli for node in plan.cluster.nodes) // 1000
    shared = [
        dt.Role(
            role.name,
            role.cls,
            profile=role.profile,
            workers=role.workers,
            pool=role.pool,
            together=dt.Together("train", share="max") if role.together else None,
        )
        for role in loaded.roles
    ]
    least = dt.ActorSystem(shared, loaded.pools).plan(CLUSTERS[name])
    found = (total - plan.free_cpu_milli // 1000, total - least.free_cpu_milli // 1000, total)
    assert (*found, plan.gpus - plan.idle_gpus, plan.gpus) == tuple(map(int, row.groups()))


def test_the_pools_of_the_guide_limit_their_roles() -> None:
    plan = dt.ActorSystem.load(ROOT / "examples" / "actors" / "pools.yaml").plan(CLUSTERS["medium"])
    assert plan.workers == {"rollout": 64, "trainer": 4, "data_loader": 4}


def test_data_loaders_of_the_medium_example_are_near_trainers() -> None:
    plan = dt.ActorSystem.load(ROOT / "examples" / "actors" / "medium.yaml").plan(CLUSTERS["medium"])
    assert plan.nodes_of("data_loader").keys() <= plan.nodes_of("trainer").keys()
