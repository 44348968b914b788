"""URLs of stores, and what is written instead of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import dovetail as dt
from dovetail.jobs.stores import store_url
from dovetail.jobs.stores.memory_store import MemoryStore
from dovetail.jobs.stores.store_url import checked_scheme, open_store, shown_url, sqlite_path

if TYPE_CHECKING:
    from pathlib import Path

VALID = (
    "memory:",
    "sqlite:///jobs.db",
    "sqlite:////var/lib/jobs.db",
    "sqlite:///~/jobs.db",
    "redis://localhost:6379/0",
    "redis://localhost",
    "rediss://me:secret@host:6380/2",
    "unix:///run/redis.sock?db=0",
)


@pytest.mark.parametrize("url", VALID)
def test_a_valid_url_has_a_scheme(url: str) -> None:
    assert checked_scheme(url) == url.partition(":")[0]


@pytest.mark.parametrize(
    ("url", "instead"),
    [
        ("sqlit:///x.db", "sqlite:///x.db"),
        ("SQLITE:///x.db", "sqlite:///x.db"),
        ("jobs.db", "sqlite:///jobs.db"),
        ("/var/lib/jobs.db", "sqlite:////var/lib/jobs.db"),
        ("sqlite:/x.db", "sqlite:///x.db"),
        ("sqlite://x.db", "sqlite:///x.db"),
        ("sqlite:", "sqlite:///jobs.db"),
        ("sqlite:///:memory:", "memory:"),
        ("sqlite:////tmp/", "sqlite:////tmp/jobs.db"),
        ("memory", "memory:"),
        ("memory:x", "memory:"),
        ("redis", "redis://localhost:6379/0"),
        ("redis://", "redis://localhost:6379/0"),
        ("redis:localhost", "redis://localhost:6379/0"),
        ("redis://host:99999/0", "redis://localhost:6379/0"),
        ("redis://host:x/0", "redis://localhost:6379/0"),
        ("redis://host/abc", "redis://localhost:6379/0"),
        ("valkey://host/0", "redis://host/0"),
        ("unix:///", "unix:///run/redis/redis.sock?db=0"),
        ("unix://x.sock", "unix:///run/redis/redis.sock?db=0"),
        ("postgres://host/db", "sqlite:///jobs.db"),
        ("", "sqlite:///jobs.db"),
        (5, "sqlite:///jobs.db"),
        (None, "sqlite:///jobs.db"),
        pytest.param("x" * 10_000_000, "sqlite:///jobs.db", id="10 MB"),
    ],
)
def test_a_wrong_url_is_refused_with_one_that_is_valid(url: object, instead: str) -> None:
    with pytest.raises(dt.ConfigError) as caught:
        checked_scheme(url)
    [problem] = caught.value.problems
    assert (problem.code, problem.fix_texts[0]) == ("DT601", f'dt.Queue("{instead}")')
    assert len(problem.render()) < 1_000
    checked_scheme(instead)


def test_the_path_of_a_file_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert sqlite_path("sqlite:///a/jobs.db") == tmp_path / "a" / "jobs.db"
    assert os.fspath(sqlite_path("sqlite:////var/my%20jobs.db")) == "/var/my jobs.db"
    assert os.fspath(sqlite_path("sqlite:///~/jobs.db")) == "/home/me/jobs.db"


def test_stores_are_opened_and_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_store("memory:"), MemoryStore)
    monkeypatch.setattr(store_url, "find_spec", lambda _name: None)
    with pytest.raises(dt.ConfigError, match="needs the package redis") as caught:
        open_store("redis://me:secret@localhost/0")
    assert caught.value.problems[0].fix_texts[0] == "pip install 'dovetail-ml[redis]'"
    assert "secret" not in str(caught.value)


def test_the_place_of_a_store_is_an_absolute_path_or_a_url_without_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert store_url.store_place("sqlite:///jobs.db") == str(tmp_path / "jobs.db")
    assert store_url.store_place("redis://me:secret@host/0") == "redis://me:***@host/0"
    assert store_url.store_place("memory:") == "memory:"


def test_passwords_are_not_shown() -> None:
    for url in VALID:
        assert "secret" not in shown_url(url)
    with pytest.raises(dt.ConfigError) as caught:
        checked_scheme("rediss://me:secret@host:99999/0")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://:se/cret@host:6379/0", "redis://me:#secret@host/0", "redis://:secret?@t@host/0"]
)
def test_a_password_that_is_not_escaped_is_named_and_not_shown(url: str) -> None:
    with pytest.raises(dt.ConfigError, match="the password has one of the characters") as caught:
        checked_scheme(url)
    assert "cret" not in str(caught.value)
    assert "%2F is /" in str(caught.value)
