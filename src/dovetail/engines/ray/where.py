"""Which Ray does an engine text mean? Pure, and without ray: 'ray', 'ray:auto', 'ray:HOST:PORT', 'ray:[V6]:PORT'."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from dovetail.errors import ConfigError, Problem, did_you_mean, shown

GCS_PORT = 6379
"""Where `ray start --head` listens unless told otherwise."""
LAST_PORT = 65535
FORMS = ("ray", "ray:auto", "ray:HOST:PORT")
NEW, RUNNING, AT = (
    "ray starts a Ray of its own on this machine",
    "ray:auto attaches to the Ray that runs here",
    f"ray:HOST:{GCS_PORT} attaches to a cluster by the address of its head",
)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_V6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")


class Kind(Enum):
    """Whose Ray it is."""

    PRIVATE = "private"
    """One that we start, and that ends with this process."""
    AUTO = "auto"
    """One that runs on this machine, or that RAY_ADDRESS names."""
    ADDRESS = "address"
    """One that was named."""


@dataclass(frozen=True, slots=True)
class Where:
    """A Ray to start or to attach to."""

    kind: Kind
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: object) -> Where:
        """Everything else is a ConfigError with the text that was meant."""
        if text == "ray":
            return cls(Kind.PRIVATE)
        if text == "ray:auto":
            return cls(Kind.AUTO)
        if not isinstance(text, str) or not text.startswith("ray:") or "://" in text:
            raise ConfigError(_no_form(text))
        return cls(Kind.ADDRESS, *_host_and_port(text, text.removeprefix("ray:")))

    @property
    def address(self) -> str:
        """HOST:PORT, as Ray writes it; empty unless it was named."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.kind is Kind.ADDRESS else ""

    def __str__(self) -> str:
        return {Kind.PRIVATE: "ray", Kind.AUTO: "ray:auto"}.get(self.kind, f"ray:{self.address}")


def is_ray(engine: object) -> bool:
    """Whether an engine text is about Ray at all, right or wrong."""
    return isinstance(engine, str) and (engine == "ray" or engine.startswith("ray:"))


def address_of(text: str) -> Where | None:
    """HOST:PORT as found in RAY_ADDRESS or in Ray's own file; None, if it is something else."""
    if "://" in text:
        return None
    try:
        return Where(Kind.ADDRESS, *_host_and_port(f"ray:{text}", text.strip()))
    except ConfigError:
        return None


def _no_form(text: object) -> Problem:
    client = re.fullmatch(r"(?:ray:)?ray://(?P<host>[^/]*?)(?::[0-9]*)?/?", text) if isinstance(text, str) else None
    if client is not None:
        message = f"{shown(text)} is an address of Ray Client, which puts a proxy between the run and its workers"
        evidence = ("Ray Client costs 7 ms per message, and sees neither nodes nor placement groups as they are",)
        fixes = (f"ray:{client['host'] or 'HOST'}:{GCS_PORT} on a machine that is a node of the cluster", RUNNING)
        return Problem("DT390", message, evidence, fixes)
    hint = did_you_mean(text, FORMS) if isinstance(text, str) else ""
    return Problem("DT390", f"there is no engine {shown(text)}{hint}", fixes=(NEW, RUNNING, AT))


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    if rest in ("", "local", "new"):
        raise ConfigError(Problem("DT390", f"{shown(text)} names no Ray", fixes=(NEW, RUNNING, AT)))
    bracketed = re.fullmatch(r"\[(?P<host>[^\]]*)\](?::(?P<port>.*))?", rest)
    host, port = bracketed.group("host", "port") if bracketed else _halves(text, rest)
    if not (_V6 if bracketed else _HOST).fullmatch(host):
        message = f"{shown(text)}: {shown(host)} is not the name or address of a host"
        raise ConfigError(Problem("DT390", message, fixes=(AT, RUNNING)))
    if port is None or port == "":
        fix = f"ray:{rest.rstrip(':')}:{GCS_PORT}, the port that `ray start --head` uses"
        raise ConfigError(Problem("DT390", f"{shown(text)} names no port", fixes=(fix, RUNNING)))
    if not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) <= LAST_PORT:
        message = f"{shown(text)}: {shown(port)} is not a port from 1 to {LAST_PORT}"
        shape = f"[{host}]" if bracketed else host
        raise ConfigError(Problem("DT390", message, fixes=(f"ray:{shape}:{GCS_PORT}", RUNNING)))
    return host, int(port)


def _halves(text: str, rest: str) -> tuple[str, str | None]:
    if rest.count(":") > 1:
        message = f"{shown(text)}: an IPv6 address is written in brackets"
        host, _, port = rest.rpartition(":")
        raise ConfigError(Problem("DT390", message, fixes=(f"ray:[{host}]:{port}", f"or ray:[{rest}]:{GCS_PORT}")))
    host, colon, port = rest.partition(":")
    return host, port if colon else None
