"""Files of a run are private, and nothing that other users could have written is unpickled."""

from __future__ import annotations

import base64
import json
import os
import pickle
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dovetail as dt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("in_process")
CLUSTER = "1x(2cpu, 4GB)"
OTHER_USER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home that does not exist yet, for a user whose files are writable by the group."""
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "deep" / "home"))
    before = os.umask(0o002)
    yield tmp_path / "deep" / "home"
    os.umask(before)


def only_small(row: dict[str, int]) -> dict[str, int]:
    if row["n"] > 2:
        raise ValueError("too large")
    return row


def start_run(tmp_path: Path, **more: Any) -> dt.Run:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(4)))
    pipeline = dt.Pipeline([dt.Stage("small", dt.each(only_small), on_error="skip")])
    return dt.run(pipeline, str(source), sink=str(tmp_path / "out.jsonl"), cluster=CLUSTER, progress=False, **more)


def retry(run: str) -> None:
    pipeline = dt.Pipeline([dt.Stage("small", dt.each(only_small), on_error="skip")])
    dt.run(pipeline, retry_errors=run, cluster=CLUSTER, progress=False).wait()


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def put_trap(errors: Path, mark: Path) -> None:
    """Replace the failed items, as a member of the group could."""
    (line,) = map(json.loads, errors.read_text().splitlines())
    del line["item"]
    line["item_pickle"] = base64.b64encode(pickle.dumps(Trap(mark))).decode()
    errors.unlink()
    errors.write_text(json.dumps(line) + "\n")


def test_folders_are_0700_and_files_0600_and_outputs_follow_the_umask(tmp_path: Path, home: Path) -> None:
    start_run(tmp_path, record=True).wait()
    modes: dict[str, set[int]] = {"folder": set(), "file": set()}
    for path in [home, *home.rglob("*")]:
        modes["folder" if path.is_dir() else "file"].add(stat.S_IMODE(path.stat().st_mode))
    assert modes == {"folder": {0o700}, "file": {0o600}}
    assert any(path.name == "errors.jsonl" for path in home.rglob("*"))
    assert (home / "ledger.db").exists()
    assert stat.S_IMODE((tmp_path / "out.jsonl").stat().st_mode) == 0o664
    assert stat.S_IMODE(home.parent.stat().st_mode) == 0o775  # a folder of the user's


@pytest.mark.parametrize("which", ["home", "runs", "run", "errors", "errors.jsonl"])
def test_a_retry_unpickles_nothing_that_the_group_can_write(tmp_path: Path, home: Path, which: str) -> None:
    folder = Path(start_run(tmp_path).wait().folder)
    paths = {"home": home, "runs": folder.parent, "run": folder, "errors": folder / "errors"}
    put_trap(folder / "errors" / "errors.jsonl", tmp_path / "executed")
    (folder / "errors" / "errors.jsonl").chmod(0o600)
    wrong = paths.get(which, folder / "errors" / "errors.jsonl")
    wrong.chmod(0o770)
    with pytest.raises(dt.ConfigError) as caught:
        retry("last")
    (problem,) = caught.value.problems
    assert (problem.code, problem.evidence) == ("DT382", (f"{wrong} is writable by its group",))
    assert not (tmp_path / "executed").exists()
    assert problem.fix_texts == (f"chmod go-w {wrong}",)
    wrong.chmod(0o750)
    retry("last")
    assert (tmp_path / "executed").exists()  # otherwise this test would show nothing


@needs_root
def test_a_retry_unpickles_nothing_of_another_user(tmp_path: Path, home: Path) -> None:
    folder = Path(start_run(tmp_path).wait().folder)
    errors = folder / "errors" / "errors.jsonl"
    put_trap(errors, tmp_path / "executed")
    errors.chmod(0o600)
    os.chown(errors, OTHER_USER, OTHER_USER)
    with pytest.raises(dt.ConfigError, match=f"{errors} belongs to user {OTHER_USER}"):
        retry(str(folder))
    assert not (tmp_path / "executed").exists()
    assert folder.is_relative_to(home)


@needs_root
def test_a_new_run_takes_no_folder_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    os.chown(theirs, OTHER_USER, OTHER_USER)
    with pytest.raises(dt.ConfigError, match=f"belongs to user {OTHER_USER}") as caught:
        start_run(tmp_path, run_dir=theirs)
    assert caught.value.problems[0].code == "DT303"
    assert list(theirs.iterdir()) == []


def test_a_new_run_makes_an_empty_folder_of_this_user_private(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    mine.chmod(0o777)
    start_run(tmp_path, run_dir=mine).wait()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700


def test_a_new_run_takes_no_part_files_that_others_can_write(tmp_path: Path) -> None:
    parts = tmp_path / ".out.jsonl.mine.parts"
    parts.mkdir()
    parts.chmod(0o777)
    with pytest.raises(dt.ConfigError, match="is writable by everyone") as caught:
        start_run(tmp_path, run_dir=tmp_path / "mine")
    assert caught.value.problems[0].code == "DT351"


def test_a_resume_removes_temporary_files_of_a_killed_driver(tmp_path: Path) -> None:
    folder = Path(start_run(tmp_path, run_dir=tmp_path / "mine").wait().folder)
    left = folder / ".run.json.4711.tmp"
    left.touch()
    with pytest.raises(dt.ConfigError, match="already finished"):
        start_run(tmp_path, resume=folder)
    assert not left.exists()


# --- secrets


def start_with_overrides(tmp_path: Path, *sets: str) -> dt.Run:
    from dovetail.cli.saved_arguments import RunArguments, arguments_for_header

    more = arguments_for_header(RunArguments("pipeline.yaml", sets), has_sink=True)
    return start_run(tmp_path, run_dir=tmp_path / "mine", more=more)


def test_secrets_of_arguments_are_masked_in_run_json_and_kept_for_a_resume(tmp_path: Path) -> None:
    from dovetail.cli.saved_arguments import read_saved_arguments
    from dovetail.observe.run_folder import RunFolder

    sets = ("stages.small.env.TOKEN=s3cret", "stages.small.workers=1", "source.storage_options.secret=s3cret")
    folder = Path(start_with_overrides(tmp_path, *sets).wait().folder)
    holding = [path.name for path in folder.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert holding == ["secrets.json"]
    assert stat.S_IMODE((folder / "secrets.json").stat().st_mode) == 0o600
    shown = json.loads((folder / "run.json").read_text())["more"]["asked"]["sets"]
    assert shown == ["stages.small.env.TOKEN=***", "stages.small.workers=1", "source.storage_options.secret=***"]
    saved = read_saved_arguments(RunFolder(folder))
    assert saved is not None
    assert saved.sets == sets


def test_a_run_without_secrets_has_no_file_of_them(tmp_path: Path) -> None:
    folder = Path(start_with_overrides(tmp_path, "stages.small.workers=1").wait().folder)
    assert not (folder / "secrets.json").exists()
