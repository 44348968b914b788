"""Options of a worker, checked together, and the environment variables that set them."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.documents.fields import Type, WrongValue, is_int
from dovetail.errors import UNSET, Change, ClusterError, ConfigError, Given, Problem, Subject, Text, short_repr
from dovetail.jobs.submit_options import ISOLATIONS, NAME
from dovetail.pipeline.durations import parse_duration
from dovetail.resources.cluster import Cluster, Gpu, Node
from dovetail.resources.resources import Resources
from dovetail.resources.sizes import parse_milli, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from dovetail.documents.fields import Mistake

BAD_WORKER_OPTION = "DT620"
BAD_VARIABLE = "DT621"
NO_SUCH_GPU = "DT622"
TIMEOUT_NOT_KEPT = "DT623"
AUTO = "auto"
SLOTS_LIMIT = 10_000
RECYCLE_LIMIT = 10**9
SLOTS_TEXT = f"auto, or a whole number from 1 to {SLOTS_LIMIT}"
MIN_LEASE_S, MAX_LEASE_S = 0.2, 86_400.0
MAX_PLACEMENT_DELAY_S = 10.0
"""A job is passed over again after this time (`worker_choice.DEFERRAL_KEPT_MS`)."""
VARIABLES = ("MAX_CONCURRENT_JOBS", "USE_GPU", "GPU_DEVICE", "JOB_TIMEOUT", "WORKER_ID")
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off", ""})


def _slots_mistakes(value: object) -> Iterator[Mistake]:
    if value != AUTO and (not is_int(value) or not 1 <= value <= SLOTS_LIMIT):
        yield WrongValue(value, SLOTS_TEXT, instead=(2, AUTO))


SLOTS = Type(
    SLOTS_TEXT,
    AUTO,
    {"anyOf": [{"enum": [AUTO]}, {"type": "integer", "minimum": 1, "maximum": SLOTS_LIMIT}]},
    _slots_mistakes,
)
"""Slots of workers as a key of a file."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker in their units."""

    worker_id: str
    queues: tuple[str, ...] = ("default",)
    slots: int | None = None
    """None: auto."""
    isolation: str | None = None
    """Isolation of jobs that neither request nor need one; None: `process`."""
    use_gpu: bool | None = None
    """Whether GPUs are used; None: if jobs request GPUs."""
    gpu_device: str | None = None
    """Indices or CUDA names of cards, separated by commas."""
    job_timeout_s: float | None = None
    """Default timeout of jobs that have none."""
    lease_ms: int = 15_000
    grace_s: float = 30.0
    """Time for running jobs at the end of the worker."""
    kill_grace_s: float = 5.0
    """Time from SIGTERM to SIGKILL of a job's process."""
    placement_delay_ms: int = 50
    """Maximum time that a job waits for a more suitable worker; 0: none."""
    rendezvous_host: str | None = None
    """Address of this machine at which the other workers reach rank 0 of a gang; None: that of the route to the
    store."""
    recycle_jobs: int | None = None
    recycle_bytes: int | None = None


def worker_options(given: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> WorkerOptions:
    """Options from arguments (those that are not `UNSET`) and variables. ConfigError with everything that is wrong."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    variables = os.environ if environment is None else environment
    for name, (variable, read) in _FROM_VARIABLES.items():
        text = variables.get(variable, "").strip()
        if text and given.get(name, UNSET) in (UNSET, AUTO):
            _read(read, text, values, name, problems, BAD_VARIABLE, f"{variable}={text}")
    for name, read in _READERS.items():
        value = given.get(name, UNSET)
        if value is not UNSET and not (value == AUTO and name in values):
            _read(read, value, values, name, problems, BAD_WORKER_OPTION, "")
    values.setdefault("worker_id", default_worker_id())
    if values.get("isolation") == "thread" and values.get("job_timeout_s") is not None:
        problems.append(_thread_timeout_problem(values["job_timeout_s"]))
    if problems:
        raise ConfigError(problems)
    slots = values.get("slots")
    found = WorkerOptions(**{**values, "slots": None if slots == AUTO else slots})
    return found if found.use_gpu is not False else replace(found, gpu_device=None)


def default_worker_id() -> str:
    """Unique: host, pid and a random part, because containers have equal pids."""
    host = "".join(char if char.isalnum() or char in "-_." else "-" for char in socket.gethostname())[:60]
    return f"{host.strip('-_.') or 'worker'}-{os.getpid()}-{os.urandom(2).hex()}"


def _read(
    read: Callable[[Any], Any],
    value: object,
    values: dict[str, Any],
    name: str,
    problems: list[Problem],
    code: str,
    shown: str,
) -> None:
    try:
        values[name] = read(value)
    except _WrongOptionError as error:
        fix = error.fix if code == BAD_WORKER_OPTION else (f"export {_FROM_VARIABLES[name][0]}={error.example}",)
        message = Text(shown or Given(error.name, value), f" {error.reason}")
        problems.append(Problem(code, message, fixes=fix, subject=Subject("setting", error.name)))
    except (ValueError, TypeError) as error:
        message = Text(shown or Given(name, value), f" {error}")
        problems.append(Problem(code, message, fixes=(_EXAMPLES[name],), subject=Subject("setting", name)))


class _WrongOptionError(Exception):
    def __init__(self, name: str, reason: str, example: object) -> None:
        self.name = name
        """Name of the argument, without the unit that the option has here."""
        self.reason = reason
        self.example = example
        self.fix = (Change({name: example}),)


def _count(name: str, limit: int, *, auto: bool = False) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if auto and value == AUTO:
            return AUTO
        if isinstance(value, str) and value.isascii() and value.isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            or_auto = ' or "auto"' if auto else ""
            raise _WrongOptionError(name, f"is not a whole number from 1 to {limit:,}{or_auto}", 2)
        return value

    return read


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _seconds(name: str, least: float = 0.0, most: float = 366 * 86_400.0, example: str = "30s") -> Callable[[Any], Any]:
    def read(value: Any) -> float:
        try:
            seconds = parse_duration(_as_number(value))
        except ValueError as error:
            raise _WrongOptionError(name, str(error), example) from None
        if not least <= seconds <= most:
            raise _WrongOptionError(name, f"is not between {least:g} s and {most:g} s", example)
        return seconds

    return read


def _as_number(value: Any) -> Any:
    """A variable may be a number of seconds."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _grace(name: str) -> Callable[[Any], Any]:
    read = _seconds(name)
    return lambda value: 0.0 if value == 0 and not isinstance(value, bool) else read(value)


def _lease_ms(value: Any) -> int:
    seconds: float = _seconds("lease", MIN_LEASE_S, MAX_LEASE_S, "15s")(value)
    return round(1000 * seconds)


def _placement_delay_ms(value: Any) -> int:
    if value == 0 and not isinstance(value, bool):
        return 0
    seconds: float = _seconds("placement_delay", most=MAX_PLACEMENT_DELAY_S, example="50ms")(value)
    return round(1000 * seconds)


def _name(value: Any) -> str:
    if next(iter(NAME.check(value)), None) is not None:
        raise _WrongOptionError("worker_id", f"is not {NAME.text}", "worker-1")
    return str(value)


def _queues(value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)
    if not names or any(next(iter(NAME.check(name)), None) is not None for name in names):
        raise _WrongOptionError("queues", f"is not a list of queues, each {NAME.text}", ["default"])
    return tuple(dict.fromkeys(names))


def _isolation(value: Any) -> str:
    if value not in ISOLATIONS:
        raise _WrongOptionError("isolation", f"is not one of {', '.join(ISOLATIONS)}", "process")
    return str(value)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise _WrongOptionError("use_gpu", "is not true or false", "true")
    return text in _TRUE


def _device(value: Any) -> str:
    text = str(value).strip()
    if isinstance(value, bool) or not text or any(not part.strip() for part in text.split(",")):
        raise _WrongOptionError("gpu_device", "is not the index of a GPU, or several with commas", "0")
    return text


def _host(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9.:_-]{1,253}", value):
        raise _WrongOptionError("rendezvous_host", "is not a name or an address of this machine", "10.0.0.7")
    return value


def _bytes(value: Any) -> int:
    size: int = value if isinstance(value, int) and not isinstance(value, bool) else parse_size(value)
    if size < 1:
        raise _WrongOptionError("recycle_bytes", "is not a size above 0", "4GB")
    return size


_READERS: dict[str, Callable[[Any], Any]] = {
    "worker_id": _name,
    "queues": _queues,
    "slots": _count("slots", SLOTS_LIMIT, auto=True),
    "isolation": _optional(_isolation),
    "use_gpu": _optional(_flag),
    "gpu_device": _optional(_device),
    "job_timeout_s": _optional(_seconds("job_timeout", example="1h")),
    "lease_ms": _lease_ms,
    "grace_s": _grace("grace"),
    "kill_grace_s": _grace("kill_grace"),
    "placement_delay_ms": _placement_delay_ms,
    "rendezvous_host": _optional(_host),
    "recycle_jobs": _optional(_count("recycle_jobs", RECYCLE_LIMIT)),
    "recycle_bytes": _optional(_bytes),
}
_FROM_VARIABLES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "slots": ("MAX_CONCURRENT_JOBS", _count("slots", SLOTS_LIMIT)),
    "use_gpu": ("USE_GPU", _flag),
    "gpu_device": ("GPU_DEVICE", _device),
    "job_timeout_s": ("JOB_TIMEOUT", _seconds("job_timeout", example="3600")),
    "worker_id": ("WORKER_ID", _name),
}
_EXAMPLES = {"recycle_bytes": Change({"recycle_bytes": "4GB"})}


def _thread_timeout_problem(seconds: float) -> Problem:
    message = f"isolation='thread' cannot keep a job timeout of {seconds:g} s: a thread cannot be interrupted"
    fixes = (Change({"isolation": "process"}), "unset JOB_TIMEOUT")
    return Problem(TIMEOUT_NOT_KEPT, message, fixes=fixes)


# --- resources and cards


def worker_node(resources: object) -> tuple[Node, bool]:
    """The node that a worker offers, and whether it was given: `resources` is "auto" (this machine, by a claim), a
    `Resources`, or the specification of one node."""
    if resources == AUTO:
        return Cluster.local().nodes[0], False
    if isinstance(resources, Resources):
        return _node_of(resources), True
    try:
        nodes = Cluster.of(resources).nodes
    except ClusterError as error:
        raise ConfigError(replace(problem, place="resources") for problem in error.problems) from None
    if len(nodes) != 1:
        message = f"resources={short_repr(resources)} describes {len(nodes)} nodes; a worker runs on one"
        raise ConfigError(Problem(BAD_WORKER_OPTION, message, fixes=(Change({"resources": nodes[0].spec()}),)))
    return nodes[0], True


def _node_of(given: Resources) -> Node:
    cards: tuple[Gpu, ...] = ()
    if given.gpus:
        cards = Cluster.local().nodes[0].gpus[: int(given.gpus)]
        if given.gpus != int(given.gpus) or len(cards) < given.gpus:
            message = (
                f"resources with gpus={given.gpus:g}: this machine has {len(cards)} GPUs that the worker can offer"
            )
            raise ConfigError(Problem(NO_SUCH_GPU, message, fixes=(Change({"gpus": len(cards)}),)))
    return Node(
        name=socket.gethostname(),
        cpu_milli=parse_milli(given.cpus),
        memory_bytes=0 if given.memory is None else parse_size(given.memory),
        gpus=cards,
        labels=tuple(sorted(given.labels.items())),
        custom=tuple((name, parse_milli(amount)) for name, amount in sorted(given.custom.items()) if amount),
    )


def chosen_cards(node: Node, options: WorkerOptions) -> tuple[int, ...] | None:
    """Positions of the cards that the worker uses; None: all, if jobs ask for them."""
    if options.use_gpu is False:
        return ()
    if options.use_gpu is None and options.gpu_device is None:
        return None
    if not node.gpus:
        message = "the worker is set to use a GPU, but this machine has no usable one"
        evidence = ("USE_GPU or GPU_DEVICE is set, or use_gpu or gpu_device is given",)
        # what is given wins over the variables, so that it works against both
        fixes = (Change({"use_gpu": False}), "check nvidia-smi, CUDA_VISIBLE_DEVICES and the runtime of the container")
        raise ConfigError(Problem(NO_SUCH_GPU, message, evidence, fixes))
    if options.gpu_device is None:
        return tuple(range(len(node.gpus)))
    return tuple(dict.fromkeys(_position(node, part.strip()) for part in options.gpu_device.split(",")))


def _position(node: Node, device: str) -> int:
    for position, card in enumerate(node.gpus):
        if device == str(position) or (card.uuid and card.uuid.startswith(device)):
            return position
    have = ", ".join(f"{position} ({card.uuid or card.model})" for position, card in enumerate(node.gpus))
    message = f"GPU_DEVICE={device}: there is no such GPU"
    raise ConfigError(Problem(NO_SUCH_GPU, message, (f"GPUs here: {have}",), (Change({"gpu_device": "0"}),)))
