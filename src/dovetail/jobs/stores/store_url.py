"""URLs of job stores: `open_store("sqlite:///jobs.db")`. Stores are imported when they are opened."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from dovetail.errors import ConfigError, Problem, did_you_mean, nearest_word, short_repr

if TYPE_CHECKING:
    from dovetail.jobs.store import Store

BAD_QUEUE = "DT601"
URL_LIMIT_CHARS = 2_000
SCHEMES = ("memory", "sqlite", "redis", "rediss", "unix")
EXAMPLES = ("sqlite:///jobs.db", "redis://localhost:6379/0", "memory:")
ALIASES = {"valkey": "redis", "valkeys": "rediss", "file": "sqlite", "redis+unix": "unix", "redis+socket": "unix"}
"""Schemes of other programs, and ours for the same."""


def open_store(url: str) -> Store:
    """Open the store of a URL: memory:, sqlite:///relative.db, sqlite:////absolute.db, redis://host:port/db, rediss://
    or unix:///path.sock?db=0. ConfigError: not such a URL, or the package of the store is not installed."""
    scheme = checked_scheme(url)
    if scheme == "memory":
        from dovetail.jobs.stores.memory_store import MemoryStore

        return MemoryStore()
    if scheme == "sqlite":
        from dovetail.jobs.stores.sqlite_store import SqliteStore

        return SqliteStore(sqlite_path(url))
    if find_spec("redis") is None:
        message = f"{shown_url(url)} needs the package redis, which is not installed"
        raise ConfigError(
            Problem(BAD_QUEUE, message, fixes=("pip install 'dovetail-ml[redis]'", 'dt.Queue("sqlite:///jobs.db")'))
        )
    from dovetail.jobs.stores.redis_store import RedisStore

    return RedisStore(url)


def checked_scheme(url: object) -> str:
    """The scheme of a valid URL; ConfigError with a URL to write instead."""
    if not isinstance(url, str | os.PathLike) or not str(url) or len(str(url)) > URL_LIMIT_CHARS:
        raise _problem(f"{short_repr(url)} is not the URL of a queue")
    text = os.fspath(url)
    scheme, colon, rest = text.partition(":")
    if not colon:
        raise _problem(f"{short_repr(text)} is not the URL of a queue", *_without_scheme(text))
    if scheme not in SCHEMES:
        near = ALIASES.get(scheme.lower()) or nearest_word(scheme, SCHEMES)
        hint = f" (did you mean {near!r}?)" if scheme.lower() in ALIASES else did_you_mean(scheme, SCHEMES)
        message = f"{shown_url(text)}: unknown scheme {short_repr(scheme)}{hint}"
        raise _problem(message, *([_quotable(f"{near}:{rest}")] if near else []))
    if scheme == "sqlite":
        _check_sqlite(text, rest)
    elif scheme == "memory" and rest:
        raise _problem(f"{short_repr(text)}: a queue in memory has no name and no path", "memory:")
    elif scheme in ("redis", "rediss", "unix"):
        _check_redis(text, scheme, rest)
    return scheme


def sqlite_path(url: str) -> Path:
    """The absolute path of the file of a sqlite URL."""
    written = unquote(url.removeprefix("sqlite:///"))
    return Path(os.path.abspath(os.path.expanduser(written)))  # noqa: PTH100, PTH111 - symbolic links stay


def store_place(url: str) -> str:
    """Where a store is, for people: the absolute path of an SQLite file, as relative ones differ by folder; else the
    URL without its password."""
    return str(sqlite_path(url)) if url.startswith("sqlite:///") else shown_url(url)


def shown_url(url: str) -> str:
    """The URL without its password, for messages and reprs."""
    return re.sub(r"(?<=://)([^/@:]*:).*@", r"\1***@", url)  # a password may have / and @ that are not escaped


def _check_sqlite(text: str, rest: str) -> None:
    if not rest.startswith("///") or not rest.removeprefix("///"):
        path = rest.lstrip("/") or "jobs.db"
        message = (
            f"{short_repr(text)}: a sqlite URL has three slashes before a relative path and four before an absolute one"
        )
        raise _problem(message, _quotable(f"sqlite:///{path}"))
    if rest in ("///:memory:", "///memory:"):
        raise _problem(f"{short_repr(text)}: a queue in memory is not kept in SQLite", "memory:")
    if rest.endswith("/"):
        raise _problem(f"{short_repr(text)} is a folder, not a file", _quotable(f"{text}jobs.db"))


def _check_redis(text: str, scheme: str, rest: str) -> None:
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if scheme == "unix":
        if not rest.startswith("///") or not parts.path.strip("/"):
            raise _problem(f"{shown_url(text)} has no path of a socket", "unix:///run/redis/redis.sock?db=0")
        return
    if not port and re.search(r"^//[^/?#@[]*:[^/?#@]*[/?#].*@", rest):
        message = f"{shown_url(text)}: the password has one of the characters / ? #, which are escaped in a URL"
        fixes = ("python3 -c \"import getpass, urllib.parse; print(urllib.parse.quote(getpass.getpass(), safe=''))\"",)
        raise ConfigError(Problem(BAD_QUEUE, message, ("%2F is /, %3F is ?, %23 is #, %40 is @",), fixes))
    if not rest.startswith("//") or not parts.hostname:
        raise _problem(f"{shown_url(text)} has no host", f"{scheme}://localhost:6379/0")
    if port == 0:
        raise _problem(f"{shown_url(text)}: the port is not a number from 1 to 65535", f"{scheme}://localhost:6379/0")
    database = parts.path.strip("/")
    if database and not (database.isdigit() and len(database) < 6):
        raise _problem(
            f"{shown_url(text)}: the database {short_repr(database)} is not a number", "redis://localhost:6379/0"
        )


def _without_scheme(text: str) -> list[str]:
    """The URL that was meant by a text without scheme."""
    if text in SCHEMES:
        return ["memory:"] if text == "memory" else [example for example in EXAMPLES if example.startswith(text)]
    if text.endswith((".db", ".sqlite", ".sqlite3")):
        return [_quotable(f"sqlite:///{text}")]
    return []


def _quotable(url: str) -> str:
    return url if len(url) <= 100 and url.isprintable() else EXAMPLES[0]


def _problem(message: str, *urls: str) -> ConfigError:
    return ConfigError(Problem(BAD_QUEUE, message, fixes=tuple(f'dt.Queue("{url}")' for url in urls or EXAMPLES)))
