"""The terminal: when output is coloured, and paths as they are shown."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from dovetail.observe.terminal import choose_colour, display_path, forced_colour, may_colour

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    choose_colour("auto")
    yield
    choose_colour("auto")


@pytest.mark.parametrize(
    ("mode", "variables", "forced"),
    [
        ("auto", {}, None),
        ("auto", {"NO_COLOR": ""}, None),
        ("auto", {"NO_COLOR": "1"}, False),
        ("auto", {"FORCE_COLOR": "1"}, True),
        ("auto", {"CLICOLOR_FORCE": "1"}, True),
        ("auto", {"FORCE_COLOR": "0"}, None),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ("always", {"NO_COLOR": "1"}, True),
        ("never", {"FORCE_COLOR": "1"}, False),
    ],
)
def test_the_option_comes_before_no_color_and_that_before_force_color(
    mode: str, variables: dict[str, str], forced: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    choose_colour(mode)  # type: ignore[arg-type]
    assert forced_colour() is forced
    assert may_colour(Screen()) is (forced is not False)
    assert may_colour(io.StringIO()) is (forced is True)


def test_a_dumb_terminal_is_not_coloured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not may_colour(Screen())


def test_a_path_in_the_current_folder_is_shown_relative_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert display_path(f"{tmp_path}/a/b.jsonl") == "a/b.jsonl"
    for other in ("/data/b.jsonl", "s3://bucket/b.jsonl", "b.jsonl"):
        assert display_path(other) == other
