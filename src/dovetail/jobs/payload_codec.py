"""Arguments and results of jobs as bytes: JSON by default, pickle only if the queue was opened with it.

JSON keeps values exactly, or refuses them with their path: `args[0].model.weights`. What is kept:

- None, True, False, texts, whole numbers of at most 4,300 digits, finite floats, lists, and mappings with texts for
  keys, nested at most 200 levels deep;
- scalars of NumPy, and subclasses of str, int and float, become the plain value that is equal to them;
- subclasses of list and dict become plain ones;
- **a tuple becomes a list.** This is the only change of a value.

Everything else is refused: NaN and infinity, bytes, sets, dates, paths, enumerations, named tuples, dataclasses, models
of pydantic, arrays and other objects.

An encoding is "json" or "pickle". With "+file", the bytes are the name of a file that has the data
(`payload_files.py`): data above `inline_limit_bytes` goes there, so that stores stay small.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError, Problem, short_repr
from dovetail.resources.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dovetail.jobs.payload_files import PayloadFiles

NOT_JSON = "DT605"
PICKLE_REFUSED = "DT606"
TOO_LARGE = "DT618"
INLINE_LIMIT_BYTES = 256 * 1024
MAX_DEPTH = 200
MISTAKES_SHOWN = 10
PATH_LIMIT_CHARS = 100
JSON, PICKLE, FILE = "json", "pickle", "+file"
ARGUMENTS_ARE = "the arguments are"
NO_CALL = b"[[],{}]"
"""A call without arguments."""

_ALLOW_PICKLE = "dt.Queue(url, allow_pickle=True), and `dovetail worker --allow-pickle`"
_PLAIN = frozenset({str, int, bool, type(None), float})
_INT_LIMIT = 10**4300
"""Maximum number of digits of an integer; Python does not convert longer ones to or from text."""
_TEXT_KEYS = frozenset({str})
_dumps = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False).encode
_ascii_dumps = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


@dataclass(frozen=True, slots=True)
class PayloadCodec:
    """How a queue or worker encodes arguments and results."""

    allow_pickle: bool = False
    files: PayloadFiles | None = None
    """Files for data above the limit; None: such data is refused."""
    inline_limit_bytes: int = INLINE_LIMIT_BYTES
    owner: str = ""
    """Id of the job that files are written for; they are deleted with it."""

    def of_job(self, job_id: str) -> PayloadCodec:
        """The codec for the arguments and the result of one job."""
        return self if self.files is None else dataclasses.replace(self, owner=job_id)


@dataclass(frozen=True, slots=True)
class NotJson:
    """A value that JSON cannot keep."""

    path: str
    value: object
    reason: str
    instead: str
    """Python source of a value to pass instead; "" if unknown."""


# --- calls and results


def encode_call(args: Sequence[Any], kwargs: Mapping[str, Any], codec: PayloadCodec) -> tuple[bytes, str]:
    """(payload, encoding) of the arguments of a job. Raises ConfigError if they are not JSON, or too large."""
    if not args and not kwargs:
        return NO_CALL, JSON
    if codec.allow_pickle:
        text = _json_or_none([list(args), kwargs], exactly=True)
        data, encoding = (_pickled((tuple(args), dict(kwargs))), PICKLE) if text is None else (text, JSON)
    else:
        mistakes: list[NotJson] = []
        data, encoding = _json((list(args), dict(kwargs)), _call_path, mistakes), JSON
        _raise(mistakes, ARGUMENTS_ARE)
    return _placed(data, encoding, codec, "arguments")


def decode_call(payload: bytes, encoding: str, codec: PayloadCodec) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse of `encode_call`."""
    if payload == NO_CALL:
        return (), {}
    args, kwargs = _decoded(payload, encoding, codec)
    return tuple(args), kwargs


def encode_result(value: object, codec: PayloadCodec) -> tuple[bytes, str]:
    """(data, encoding) of the result of a job. Raises ConfigError if it is not JSON, or too large."""
    if value is None:
        return b"null", JSON
    if codec.allow_pickle:
        text = _json_or_none(value, exactly=True)
        data, encoding = (_pickled(value), PICKLE) if text is None else (text, JSON)
    else:
        mistakes: list[NotJson] = []
        data, encoding = _json(value, lambda path: "result" + path, mistakes), JSON
        _raise(mistakes, "the result is")
    return _placed(data, encoding, codec, "result")


def decode_result(data: bytes, encoding: str, codec: PayloadCodec) -> object:
    """The inverse of `encode_result`."""
    return _decoded(data, encoding, codec)


def file_of(data: bytes, encoding: str) -> str | None:
    """Name of the file that has the data, if it is not inline."""
    return data.decode() if encoding.endswith(FILE) else None


def _placed(data: bytes, encoding: str, codec: PayloadCodec, what: str) -> tuple[bytes, str]:
    if len(data) <= codec.inline_limit_bytes:
        return data, encoding
    if codec.files is None:
        message = f"{what} of {format_size(len(data))}: the queue has no folder for large data"
        evidence = (f"up to {format_size(codec.inline_limit_bytes)} are kept in the queue itself",)
        fixes = (
            'dt.Queue(url, files="/shared/folder")',
            'dt.Queue(url, files="s3://bucket/jobs")',
            "pass the path of a file",
        )
        raise ConfigError(Problem(TOO_LARGE, message, evidence, fixes))
    return codec.files.write(data, codec.owner).encode(), encoding + FILE


def _decoded(data: bytes, encoding: str, codec: PayloadCodec) -> Any:
    kind = encoding.removesuffix(FILE)
    if kind == PICKLE and not codec.allow_pickle:
        message = "the data is pickled, and pickle is not allowed here: it can run any code"
        raise ConfigError(Problem(PICKLE_REFUSED, message, fixes=(_ALLOW_PICKLE,)))
    if kind not in (JSON, PICKLE):
        message = f"unknown encoding {short_repr(encoding)}: it was written by a newer version"
        raise ConfigError(Problem(PICKLE_REFUSED, message, fixes=("pip install --upgrade dovetail-ml",)))
    if kind != encoding:
        if codec.files is None:
            message = f"the data is in the file {short_repr(data.decode())}, and this queue has no folder for files"
            raise ConfigError(
                Problem(TOO_LARGE, message, fixes=('dt.Queue(url, files="the folder of the submitter")',))
            )
        data = codec.files.read(data.decode())
    if kind == JSON:
        return json.loads(data)
    import pickle  # imported late: only queues that allow it need it

    return pickle.loads(data)  # noqa: S301 - the user has allowed it for this queue


def _pickled(value: object) -> bytes:
    import cloudpickle

    return bytes(cloudpickle.dumps(value))


# --- JSON


def find_not_json(value: object, name: str) -> list[NotJson]:
    """All parts of a value that JSON cannot keep."""
    mistakes: list[NotJson] = []
    _plain(value, "", 0, mistakes)
    return [dataclasses.replace(mistake, path=name + mistake.path) for mistake in mistakes]


def _json(value: object, named: Callable[[str], str], mistakes: list[NotJson]) -> bytes:
    """The value as JSON; b"" if there are mistakes."""
    found = _json_or_none(value)
    if found is not None:
        return found
    copy = _plain(value, "", 0, mistakes)
    if mistakes:
        mistakes[:] = [dataclasses.replace(mistake, path=named(mistake.path)) for mistake in mistakes]
        return b""
    return _encoded(copy)


def _json_or_none(value: object, *, exactly: bool = False) -> bytes | None:
    """The value as JSON if all its parts are of plain types; `exactly`: a tuple is not plain, either."""
    if not _is_plain(value, 0, exactly=exactly):
        return None
    try:
        return _encoded(value)
    except ValueError:  # NaN, or an integer of 4,301 digits
        return None


def _encoded(value: object) -> bytes:
    try:
        return _dumps(value).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return _ascii_dumps(value).encode()


def _is_plain(value: object, depth: int, *, exactly: bool) -> bool:
    """Whether all parts are of exact JSON types. A list of numbers costs one pass in C."""
    kind = type(value)
    if kind in _PLAIN:
        return True
    if depth > MAX_DEPTH:
        return False
    items: Any
    if kind is dict:
        assert isinstance(value, dict)
        if not _TEXT_KEYS.issuperset(map(type, value)):
            return False
        items = value.values()
    elif kind is list or (kind is tuple and not exactly):
        items = value
    else:
        return False
    if _PLAIN.issuperset(map(type, items)):
        return True
    return all(_is_plain(item, depth + 1, exactly=exactly) for item in items)


def _plain(value: Any, path: str, depth: int, mistakes: list[NotJson]) -> Any:
    """A copy of plain types; what JSON cannot keep is added to the mistakes."""
    if len(mistakes) >= MISTAKES_SHOWN:
        return None
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if depth > MAX_DEPTH:
        mistakes.append(NotJson(path, value, f"is nested more than {MAX_DEPTH} levels deep, or contains itself", ""))
    elif isinstance(value, Mapping) and isinstance(value, dict):
        return _plain_mapping(value, path, depth, mistakes)
    elif isinstance(value, list | tuple) and not hasattr(value, "_asdict"):
        return [_plain(item, f"{path}[{index}]", depth + 1, mistakes) for index, item in enumerate(value)]
    else:
        return _plain_scalar(value, path, mistakes)
    return None


def _plain_mapping(value: dict[Any, Any], path: str, depth: int, mistakes: list[NotJson]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(key, str):
            found[str.__str__(key)] = _plain(item, path + _step(key), depth + 1, mistakes)
        elif len(mistakes) < MISTAKES_SHOWN:
            reason = f"has the key {short_repr(key)} ({_type_name(key)}); keys in JSON are texts"
            mistakes.append(NotJson(path, value, reason, "{str(key): value for key, value in VALUE.items()}"))
    return found


def _plain_scalar(value: Any, path: str, mistakes: list[NotJson]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        plain = int(value)
        if abs(plain) < _INT_LIMIT:
            return plain
        mistakes.append(NotJson(path, "...", "has more than 4,300 digits", "hex(VALUE)"))
    elif isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        mistakes.append(NotJson(path, value, f"is {float(value)}, which JSON does not have", "None"))
    else:
        mistakes.append(NotJson(path, value, f"is of type {_type_name(value)}", _instead(value)))
    return None


def _step(key: str) -> str:
    return f".{key}" if key.isidentifier() else f"[{short_repr(key)}]"


def _call_path(path: str) -> str:
    """'args[0].model' for the path [0][0].model in (args, kwargs)."""
    return f"args{path[3:]}" if path.startswith("[0]") else f"kwargs{path[3:]}"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_INSTEAD_BY_TYPE = {
    "bytes": 'base64.b64encode(VALUE).decode("ascii")',
    "bytearray": 'base64.b64encode(VALUE).decode("ascii")',
    "set": "sorted(VALUE)",
    "frozenset": "sorted(VALUE)",
    "complex": "[VALUE.real, VALUE.imag]",
    "datetime.datetime": "VALUE.isoformat()",
    "datetime.date": "VALUE.isoformat()",
    "datetime.time": "VALUE.isoformat()",
    "datetime.timedelta": "VALUE.total_seconds()",
    "decimal.Decimal": "str(VALUE)",
    "fractions.Fraction": "str(VALUE)",
    "uuid.UUID": "str(VALUE)",
    "range": "list(VALUE)",
    "numpy.ndarray": "VALUE.tolist()",
    "torch.Tensor": "VALUE.tolist()",
    "dovetail.jobs.job_handle.Job": "VALUE.id, with after=VALUE",
}


def _instead(value: Any) -> str:
    """Python source of a value to pass instead."""
    from enum import Enum
    from os import PathLike

    known = _INSTEAD_BY_TYPE.get(_type_name(value))
    if known is not None:
        return known
    if isinstance(value, Enum):
        return "VALUE.value"
    if isinstance(value, PathLike):
        return "str(VALUE)"
    if hasattr(value, "_asdict"):
        return "VALUE._asdict()"
    if callable(getattr(value, "model_dump", None)):
        return 'VALUE.model_dump(mode="json")'
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "dataclasses.asdict(VALUE)"
    return "dict(VALUE)" if isinstance(value, Mapping) else ""


def call_problems(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Problem]:
    """Every argument that JSON cannot keep."""
    mistakes: list[NotJson] = []
    _json((list(args), dict(kwargs)), _call_path, mistakes)
    return [_problem(mistake, ARGUMENTS_ARE) for mistake in mistakes]


def _raise(mistakes: Sequence[NotJson], start: str) -> None:
    if mistakes:
        raise ConfigError(_problem(mistake, start) for mistake in mistakes)


def _problem(mistake: NotJson, start: str) -> Problem:
    path = mistake.path if len(mistake.path) <= PATH_LIMIT_CHARS else f"{mistake.path[:PATH_LIMIT_CHARS]}..."
    message = f"{start} not JSON: {path} {mistake.reason}"
    instead = mistake.instead.replace("VALUE", _source(mistake.path))
    ways = (f"pass {instead}",) if instead else ("pass the path of a file that has the data",)
    return Problem(NOT_JSON, message, (f"{path} = {short_repr(mistake.value)}",), (*ways, _ALLOW_PICKLE))


def _source(path: str) -> str:
    """A name for the value in a fix: the last name of its path."""
    last = path.rpartition(".")[2]
    return last if last.isidentifier() else "value"
