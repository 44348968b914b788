"""Which settings may be secrets: environment variables, and names such as api_key, token and password."""

from __future__ import annotations

import re

MASK = "***"
ENVIRONMENT_KEYS = frozenset({"env", "env_vars"})
"""All values below these keys are masked: any environment variable may be a secret."""
SECRET_NAME = re.compile(
    r"(^|[_-])(secret|token|password|passwd|credentials?|sas|(access|account|api|auth|private|secret|storage)[_-]?key)"
    r"s?([_-]|$)|^key$",
    re.IGNORECASE,
)
STORAGE_SECRET_NAME = re.compile("key|secret|token|password|sas", re.IGNORECASE)


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name may be a secret."""
    return SECRET_NAME.search(name) is not None


def is_secret_storage_option(name: str) -> bool:
    """Whether a storage option may be a secret. Object stores have many names for keys, such as sse_customer_key, so
    that more names count than of other settings."""
    return STORAGE_SECRET_NAME.search(name) is not None or is_secret_name(name)


def mask_override(text: str) -> str:
    """`path=value` as it may be shown: `path=***` if the value may be a secret."""
    path, equals, _ = text.partition("=")
    keys = path.strip().split(".")
    hidden = bool(ENVIRONMENT_KEYS.intersection(keys[1:])) or is_secret_name(keys[-1])
    return f"{path}={MASK}" if equals and hidden else text
