"""Environment variables of the driver that workers on other machines get, and hints about missing ones.

Not all variables are sent: large environments make Ray slow, and many are only valid on the machine of the driver.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dovetail.engines.local.worker_environment import DROPPED_VARIABLES, INSIDE_WORKER_VARIABLE
from dovetail.errors import ConfigError, Problem, did_you_mean, short_repr

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

SENT_NAMES = frozenset({"LOG_LEVEL", "EXPERIMENT_PATH", "PYTHONPATH", "LD_LIBRARY_PATH"})
PROXY_NAMES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"})
"""Upper or lower case: programs differ in which they read."""
SENT_PREFIXES = ("WANDB_", "HF_", "AWS_", "DOVETAIL_")
NEVER_SENT = frozenset({*DROPPED_VARIABLES, INSIDE_WORKER_VARIABLE})
"""Every worker has its own values of these."""

KEY_ERROR = re.compile(r"KeyError: '([A-Za-z_][A-Za-z0-9_]*)'")
MENTIONS_ENVIRONMENT = re.compile(r"environ|\benv\b|\bgetenv\b", re.IGNORECASE)
FROM_ENVIRON = re.compile(r"\benviron\b|\bgetenvb?\b|<frozen os>|/os\.py")
VARIABLE_NAME = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")


def select_variables(environ: Mapping[str, str], env_from: Iterable[str] = ()) -> dict[str, str]:
    """Variables to send; a ConfigError if one of `env_from` is not set, or must not be sent."""
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
        message = f"{name} cannot be sent to workers: each worker has its own value, given by its seat"
        fixes = (f"remove {name} from env_from", f'for another value: dt.Stage(..., env={{"{name}": "..."}})')
        return Problem("DT399", message, fixes=fixes, place=place)
    if name in environ:
        return None
    message = f"variable {short_repr(name)} of env_from is not set{did_you_mean(name, list(environ))}"
    return Problem("DT398", message, fixes=(f"export {name}=...", "remove it from env_from"), place=place)


def missing_variable_hint(error: str, detail: str, environ: Mapping[str, str], sent: Collection[str]) -> str | None:
    """Hint for an error in the user's code that is caused by a variable that only the driver has; None for other
    errors. `error`: type and message. `detail`: the traceback, if there is one."""
    for name in _missing_names(error, detail):
        if name in environ and name not in sent and name not in NEVER_SENT:
            return f'{name} is set for the driver, but not sent to workers: env_from=["{name}"] or --env-from {name}'
    return None


def _missing_names(error: str, detail: str) -> list[str]:
    """Names of missing variables that an error contains."""
    found = KEY_ERROR.findall(f"{error}\n{detail}")
    if detail and "Traceback" in detail and not FROM_ENVIRON.search(detail):
        found = []  # a key of another mapping
    if MENTIONS_ENVIRONMENT.search(error):
        found += VARIABLE_NAME.findall(error)
    return found
