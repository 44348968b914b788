"""Environment variables of the driver that workers on other machines get, and hints about missing ones.

Never all of them: large environments make Ray slow, and much of what a driver has is true only where the driver is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dovetail.engines.local.worker_spec import DROPPED_VARIABLES, INSIDE_WORKER_VARIABLE
from dovetail.errors import ConfigError, Problem, did_you_mean, short_repr

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

SENT_NAMES = frozenset({"LOG_LEVEL", "EXPERIMENT_PATH", "PYTHONPATH", "LD_LIBRARY_PATH"})
PROXY_NAMES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
"""In capitals or not: programs differ in which they read."""
SENT_PREFIXES = ("WANDB_", "HF_", "AWS_", "DOVETAIL_")
NEVER_SENT = frozenset({*DROPPED_VARIABLES, INSIDE_WORKER_VARIABLE})
"""What every worker has a value of its own for."""

KEY_ERROR = re.compile(r"KeyError: '([A-Za-z_][A-Za-z0-9_]*)'")
MENTIONS_ENVIRONMENT = re.compile(r"environ|\benv\b|\bgetenv\b", re.IGNORECASE)
FROM_ENVIRON = re.compile(r"environ|getenv|<frozen os>|/os\.py", re.IGNORECASE)
VARIABLE_NAME = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")


def select_variables(environ: Mapping[str, str], env_from: Iterable[str] = ()) -> dict[str, str]:
    """ConfigError: one that the user names is not there, or is not the user's to send."""
    named = tuple(dict.fromkeys(env_from))
    problems = [problem for name in named if (problem := _problem(name, environ)) is not None]
    if problems:
        raise ConfigError(problems)
    wanted = {name for name in environ if _is_sent(name)} | set(named)
    return {name: value for name, value in environ.items() if name in wanted}


def _is_sent(name: str) -> bool:
    listed = name in SENT_NAMES or name.upper() in PROXY_NAMES or name.startswith(SENT_PREFIXES)
    return listed and name not in NEVER_SENT


def _problem(name: str, environ: Mapping[str, str]) -> Problem | None:
    place = "env_from"
    if name in NEVER_SENT:
        message = f"{name} cannot be sent to workers: each has a value of its own, by its seat"
        fixes = (f"leave {name} out of env_from", f'for another value: dt.Stage(..., env={{"{name}": "..."}})')
        return Problem("DT399", message, fixes=fixes, place=place)
    if name in environ:
        return None
    message = (
        f"variable {short_repr(name)} is to be sent to workers and is not set here{did_you_mean(name, list(environ))}"
    )
    return Problem("DT398", message, fixes=(f"export {name}=...", "leave it out of env_from"), place=place)


def missing_variable_hint(error: str, detail: str, environ: Mapping[str, str], sent: Collection[str]) -> str | None:
    """What to say beside an error in a user's code that comes from a variable that only the driver has; None: this one
    does not. `error`: type and message. `detail`: the traceback, if there is one."""
    for name in _missing_names(error, detail):
        if name in environ and name not in sent and name not in NEVER_SENT:
            return (
                f"{name} is set where you started the run, but not sent to workers: "
                f'env_from=["{name}"] or --env-from {name}'
            )
    return None


def _missing_names(error: str, detail: str) -> list[str]:
    """The variables that were looked for in vain, as far as an error tells."""
    found = KEY_ERROR.findall(f"{error}\n{detail}")
    if detail and "Traceback" in detail and not FROM_ENVIRON.search(detail):
        found = []  # a key of something else
    if MENTIONS_ENVIRONMENT.search(error):
        found += VARIABLE_NAME.findall(error)
    return found
