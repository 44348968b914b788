"""Run folders: where they are, their ids, and how a run is found."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.errors import ConfigError
from dovetail.observe.run_folder import (
    RunFolder,
    create_run,
    find_run,
    home_folder,
    list_runs,
    new_run_id,
    read_json_object,
    short_run_id,
    write_atomically,
)


@pytest.fixture(autouse=True)
def dovetail_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOVETAIL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def kept(*names: str) -> None:
    for name in names:
        folder = RunFolder(home_folder() / "runs" / name)
        folder.path.mkdir(parents=True)
        folder.header.write_text("{}")


def refused(what: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_run(what)
    (problem,) = caught.value.problems
    assert problem.fix_texts
    return caught.value.problems[0].code


def test_the_home_is_the_given_one_or_one_per_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOVETAIL_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert home_folder() == tmp_path / "dovetail"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert home_folder() == Path("/home/me/.local/share/dovetail")
    monkeypatch.setenv("DOVETAIL_HOME", "~/runs")
    assert home_folder() == Path("/home/me/runs")


def test_ids_sort_by_time_and_carry_the_name() -> None:
    assert new_run_id("Ünï Video.yaml!", 0, "9f3a") == "19700101-000000-9f3a-n-video-yaml"
    assert new_run_id("", 1_800_000_000, "aaaa").endswith("-aaaa-run")
    assert new_run_id("z", 1, "ffff") < new_run_id("a", 2, "0000")


@given(st.text(), st.floats(0, 1e10))
def test_whatever_its_name_an_id_is_a_plain_file_name(name: str, wall: float) -> None:
    assert set(new_run_id(name, wall, "0123")) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_two_runs_of_the_same_second_have_their_own_folders(dovetail_home: Path) -> None:
    one, other = (create_run("video", wall=lambda: 5.0) for _ in range(2))
    assert one.path != other.path
    assert one.path.parent == dovetail_home / "runs"
    assert one.path.is_dir()


def test_a_run_can_be_kept_elsewhere_but_not_in_a_folder_of_something_else(tmp_path: Path) -> None:
    folder = create_run("video", tmp_path / "deep" / "here")
    assert folder.path == tmp_path / "deep" / "here"
    folder.header.write_text("{}")
    assert create_run("video", folder.path, again=True) == folder
    with pytest.raises(ConfigError, match="already contains a run"):
        create_run("video", folder.path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="DT302"):
        create_run("video", tmp_path / "mine")


def test_a_home_that_cannot_be_written_is_a_clear_error(dovetail_home: Path) -> None:
    dovetail_home.write_text("a file is in the way")
    with pytest.raises(ConfigError, match="DT303") as caught:
        create_run("video")
    assert caught.value.exit_code == 2
    assert "DOVETAIL_HOME" in str(caught.value)
    assert list_runs() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_home_without_permission_is_a_clear_error(dovetail_home: Path) -> None:
    dovetail_home.mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="DT303"):
        create_run("video")


def test_a_run_is_found_by_id_beginning_last_and_path(tmp_path: Path) -> None:
    kept("20260101-000000-aaaa-video", "20260102-000000-bbbb-video", "20260102-000001-cccc-audio")
    assert find_run("last").id == "20260102-000001-cccc-audio"
    assert find_run("20260101").id == "20260101-000000-aaaa-video"
    assert find_run("20260102-000000-bbbb-video").id == "20260102-000000-bbbb-video"
    assert find_run(str(home_folder() / "runs" / "20260101-000000-aaaa-video")).id == "20260101-000000-aaaa-video"
    assert refused("20260102") == "DT304"
    assert refused("nothing") == "DT301"
    assert refused("") == "DT301"
    assert refused(str(tmp_path)) == "DT302"


def test_a_run_is_found_by_its_name_or_any_part_that_only_one_run_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept("20260101-000000-aaaa-video", "20260102-000000-bbbb-video", "20260103-000000-cccc-clips-lance-length")
    header = home_folder() / "runs" / "20260103-000000-cccc-clips-lance-length" / "run.json"
    header.write_text('{"name": "clips.lance length"}')
    assert find_run("video").id == "20260102-000000-bbbb-video"  # the latest of that name
    for what in ("clips.lance length", "clips-lance-length", "clips.lance", "cccc", "000000-cccc", "LENGTH"):
        assert find_run(what).id == "20260103-000000-cccc-clips-lance-length", what
    assert short_run_id("20260101-000000-aaaa-video") == "20260101-000000-aaaa"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "video").mkdir()
    assert find_run("video").id == "20260102-000000-bbbb-video"  # the folder here is no run
    assert refused("./video") == "DT302"


def test_a_part_that_several_runs_have_is_an_error_that_lists_them() -> None:
    kept("20260101-000000-aaaa-video", "20260102-000000-bbbb-video", "20260103-000000-cccc-audio")
    with pytest.raises(ConfigError, match="DT304") as caught:
        find_run("vid")
    (problem,) = caught.value.problems
    assert problem.evidence == ("20260102-000000-bbbb-video", "20260101-000000-aaaa-video")
    assert problem.fix_texts[1] == "video is the latest run of that name"
    with pytest.raises(ConfigError, match=r"there is no run 'vdieo' \(did you mean 'video'\?\)"):
        find_run("vdieo")


def test_an_unknown_id_is_an_error_with_the_nearest_id_and_all_runs() -> None:
    kept(*(f"20260101-00000{i}-aaaa-video" for i in range(8)))
    with pytest.raises(ConfigError) as caught:
        find_run("20260101-000003-aaab-video")
    text = str(caught.value)
    assert "did you mean '20260101-000003-aaaa-video'?" in text
    assert "and 3 more" in text
    assert "fix  dovetail status 20260101-000007-aaaa-video" in text


def test_without_runs_the_error_names_the_folder(dovetail_home: Path) -> None:
    with pytest.raises(ConfigError, match="DT301") as caught:
        find_run("last")
    assert str(dovetail_home / "runs") in str(caught.value)


def test_whatever_lies_among_the_runs_is_passed_over() -> None:
    kept("20260101-000000-aaaa-video", "garbage \n name", "ünïcode")
    (home_folder() / "runs" / "file").write_text("no folder")
    (home_folder() / "runs" / "empty").mkdir()
    assert [run.id for run in list_runs()] == ["ünïcode", "garbage \n name", "20260101-000000-aaaa-video"]


@given(st.text(max_size=300))
def test_whatever_is_asked_for_is_found_or_refused(what: str) -> None:
    try:
        find_run(what)
    except ConfigError as error:
        assert error.codes[0] in ("DT301", "DT302")  # noqa: PT017


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    write_atomically(file, '{"a": 1}')
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "\ud800")
    assert read_json_object(file) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "null"])
def test_what_is_no_object_reads_as_an_empty_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert read_json_object(tmp_path / "run.json") == {}
    assert read_json_object(tmp_path / "other.json") == {}


def test_a_folder_whose_path_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid UTF-8") as caught:
        create_run("video", tmp_path / "rd-\udcff")
    assert caught.value.codes == ("DT302",)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_home_that_cannot_be_read_is_a_problem_with_a_code(dovetail_home: Path) -> None:
    dovetail_home.mkdir()
    dovetail_home.chmod(0o000)
    os.seteuid(54321)
    try:
        for attempt in (lambda: create_run("video"), list_runs):
            with pytest.raises(ConfigError) as caught:
                attempt()
            assert caught.value.codes == ("DT303",)
            assert caught.value.problems[0].fix_texts
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_runs_of_other_users_in_a_shared_home_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="dovetail-shared-home-") as shared:
        monkeypatch.setenv("DOVETAIL_HOME", shared)
        run = create_run("video")
        run.header.write_text("{}")
        assert list_runs() == [run]
        for folder in (Path(shared), run.path.parent):
            folder.chmod(0o755)
        os.seteuid(54321)
        try:
            assert list_runs() == []
        finally:
            os.seteuid(0)
