"""Engine names of Ray: parse ray, ray:auto and ray:HOST:PORT. Pure, without Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from dovetail.errors import ConfigError, Problem, did_you_mean, short_repr

DEFAULT_GCS_PORT = 6379
"""Default port of `ray start --head`."""
MAX_PORT = 65535
FORMS = ("ray", "ray:auto", "ray:HOST:PORT")
FIX_NEW, FIX_RUNNING, FIX_ADDRESS = (
    "ray starts a private Ray on this machine",
    "ray:auto attaches to the Ray cluster that runs on this machine",
    f"ray:HOST:{DEFAULT_GCS_PORT} attaches to the cluster whose head has this address",
)
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9._-]+)?")


class AddressKind(Enum):
    """Kinds of Ray that an engine name can mean."""

    PRIVATE = "private"
    """Started by Dovetail; ends with this process."""
    AUTO = "auto"
    """The cluster of RAY_ADDRESS, or the one that runs on this machine."""
    ADDRESS = "address"
    """The cluster at an address."""


@dataclass(frozen=True, slots=True)
class RayAddress:
    """A Ray to start or attach to."""

    kind: AddressKind
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: object) -> RayAddress:
        """Parse an engine name; a ConfigError suggests the correct one."""
        if text == "ray":
            return cls(AddressKind.PRIVATE)
        if text == "ray:auto":
            return cls(AddressKind.AUTO)
        if not isinstance(text, str) or not text.startswith("ray:") or "://" in text:
            raise ConfigError(_format_problem(text))
        return cls(AddressKind.ADDRESS, *_host_and_port(text, text.removeprefix("ray:")))

    @property
    def address(self) -> str:
        """HOST:PORT as Ray writes it; empty for the other kinds."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.kind is AddressKind.ADDRESS else ""

    def __str__(self) -> str:
        return {AddressKind.PRIVATE: "ray", AddressKind.AUTO: "ray:auto"}.get(self.kind, f"ray:{self.address}")


def is_ray_engine(engine: object) -> bool:
    """Whether an engine name is of Ray, valid or not."""
    return isinstance(engine, str) and (engine == "ray" or engine.startswith("ray:"))


def parse_address(text: str) -> RayAddress | None:
    """Parse HOST:PORT, as in RAY_ADDRESS or in Ray's own file; None if it has another form."""
    if "://" in text:
        return None
    try:
        return RayAddress(AddressKind.ADDRESS, *_host_and_port(f"ray:{text}", text.strip()))
    except ConfigError:
        return None


def _format_problem(text: object) -> Problem:
    client = re.fullmatch(r"(?:ray:)?ray://(?P<host>[^/]*?)(?::[0-9]*)?/?", text) if isinstance(text, str) else None
    if client is not None:
        message = f"{short_repr(text)} is a Ray Client address; Ray Client is not supported"
        evidence = ("Ray Client adds a proxy: 7 ms per message, and no direct access to nodes and placement groups",)
        fixes = (
            f"ray:{client['host'] or 'HOST'}:{DEFAULT_GCS_PORT} on a machine that is a node of the cluster",
            FIX_RUNNING,
        )
        return Problem("DT390", message, evidence, fixes)
    hint = did_you_mean(text, FORMS) if isinstance(text, str) else ""
    return Problem("DT390", f"unknown engine {short_repr(text)}{hint}", fixes=(FIX_NEW, FIX_RUNNING, FIX_ADDRESS))


def _host_and_port(text: str, rest: str) -> tuple[str, int]:
    if rest in ("", "local", "new"):
        raise ConfigError(
            Problem("DT390", f"{short_repr(text)} has no address", fixes=(FIX_NEW, FIX_RUNNING, FIX_ADDRESS))
        )
    bracketed = re.fullmatch(r"\[(?P<host>[^\]]*)\](?::(?P<port>.*))?", rest)
    host, port = bracketed.group("host", "port") if bracketed else _split_port(text, rest)
    if not (_IPV6 if bracketed else _HOST).fullmatch(host):
        message = f"{short_repr(text)}: {short_repr(host)} is not a valid host name or address"
        raise ConfigError(Problem("DT390", message, fixes=(FIX_ADDRESS, FIX_RUNNING)))
    if port is None or port == "":
        fix = f"ray:{rest.rstrip(':')}:{DEFAULT_GCS_PORT}, the default port of `ray start --head`"
        raise ConfigError(Problem("DT390", f"{short_repr(text)} has no port", fixes=(fix, FIX_RUNNING)))
    if not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) <= MAX_PORT:
        message = f"{short_repr(text)}: {short_repr(port)} is not a port number (1 to {MAX_PORT})"
        shape = f"[{host}]" if bracketed else host
        raise ConfigError(Problem("DT390", message, fixes=(f"ray:{shape}:{DEFAULT_GCS_PORT}", FIX_RUNNING)))
    return host, int(port)


def _split_port(text: str, rest: str) -> tuple[str, str | None]:
    if rest.count(":") > 1:
        message = f"{short_repr(text)}: an IPv6 address must be in brackets"
        host, _, port = rest.rpartition(":")
        raise ConfigError(Problem("DT390", message, fixes=(f"ray:[{host}]:{port}", f"ray:[{rest}]:{DEFAULT_GCS_PORT}")))
    host, colon, port = rest.partition(":")
    return host, port if colon else None
