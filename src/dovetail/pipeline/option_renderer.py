"""Fixes as options of the command line."""

from __future__ import annotations

import shlex
from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING

from dovetail.documents.yaml_writer import yaml_literal
from dovetail.errors import UNSET, Expression, Renderer, with_note
from dovetail.pipeline.overrides import set_option
from dovetail.pipeline.source_sink import SOURCE_AND_SINK
from dovetail.pipeline.stage import Stage
from dovetail.resources.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dovetail.errors import AddNodes, Change, Given, Subject
    from dovetail.resources.cluster import Cluster

STAGE_SETTINGS = {item.name: item for item in (*fields(Resources), *fields(Stage))}
RESOURCE_SETTINGS = frozenset(item.name for item in fields(Resources))
NEGATIVE_OPTIONS = frozenset({"wait"})
"""Settings that are on by default, for which there is an option --no-NAME."""


class OptionRenderer(Renderer):
    """Fixes as options: `--set stages.caption.resources.gpus=1`, `--mode waves`, `--cluster "..."`.

    `cluster` is the one that --cluster describes; None if the cluster belongs to Ray and no option describes it.
    `nodes` are all nodes that the problems of an error add: an option can be given only once, so that every fix with
    --cluster adds all of them. A real run on this machine (`is_real`) cannot have more nodes. `leaf_sinks` has the leaf
    stage of each path, if a pipeline has one sink per leaf.
    """

    def __init__(
        self,
        cluster: Cluster | None = None,
        nodes: tuple[AddNodes, ...] = (),
        *,
        is_real: bool = False,
        leaf_sinks: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.nodes = nodes
        self.is_real = is_real
        self.leaf_sinks = leaf_sinks or {}

    def change(self, fix: Change, subject: Subject | None) -> str:
        subjects = fix.subjects or ((subject,) if subject is not None else ())
        stages = [one for one in subjects if one.kind == "stage"]
        roles = [one for one in subjects if one.kind == "role"]
        ends = [one for one in subjects if one.kind in SOURCE_AND_SINK]
        typed: list[str] = []
        removed: list[str] = []
        for name, value in fix.values.items():
            if stages and name in STAGE_SETTINGS:
                typed += [self.set_option(stage, name, value) for one in stages for stage in one.names]
            elif roles and value is not UNSET:
                typed += [_set_option("roles", role, name, value) for one in roles for role in one.names]
            elif ends:
                typed += [self.end_option(end, name, None if value is UNSET else value) for end in ends]
            elif value is UNSET:
                removed.append(self.name(name))
            else:
                typed.append(self.option(name, value))
        text = " ".join(dict.fromkeys(typed))
        if removed:
            text += f"{', and ' if typed else ''}omit {' and '.join(removed)}"
        return with_note(text, fix.note)

    def set_option(self, stage: str, name: str, value: object) -> str:
        """`--set` for a setting of a stage; a setting that is removed gets its default value."""
        return _set_option("stages", stage, name, _default(name) if value is UNSET else value)

    def end_option(self, end: Subject, name: str, value: object) -> str:
        """The option for a setting of the source or of a sink; `source` and `sink` themselves are paths."""
        leaf = self.leaf_sinks.get(end.name)
        where = end.kind if leaf is None else f"sink.stages.{leaf}"
        if name == end.kind:
            return self.option(name, value) if leaf is None else set_option(f"{where}.path", yaml_literal(value))
        return set_option(f"{where}.{name}", yaml_literal(value))

    def option(self, name: str, value: object) -> str:
        """An option of the command."""
        if name in NEGATIVE_OPTIONS:
            negative = f"--no-{name.replace('_', '-')}"
            return f"omit {negative}" if value else negative
        return self.name(name) if value is True else f"{self.name(name)} {shell_literal(value)}"

    def name(self, setting: str) -> str:
        return f"--{setting.replace('_', '-')}"

    def given(self, given: Given) -> str:
        return f"{self.name(given.name)} {shell_literal(given.value)}"

    def add_nodes(self, fix: AddNodes) -> str:
        if self.cluster is None:
            return f"add {fix.count} x {fix.node} to the Ray cluster"
        if self.is_real:
            return f"--engine ray:HOST:PORT  # a Ray cluster that has {fix.count}x{fix.node}"
        added = " + ".join(f"{one.count}x{one.node}" for one in self.nodes or (fix,))
        return f'--cluster "{_short_spec(self.cluster)} + {added}"'


def _short_spec(cluster: Cluster) -> str:
    """The spec with sizes of this machine rounded down, such as 23.5GB."""
    return replace(cluster, nodes=tuple(node.rounded() for node in cluster.nodes)).spec()


def shell_literal(value: object) -> str:
    """A value of an option, quoted for a shell: a tuple is a range, a list has commas."""
    match value:
        case Expression():
            return str(value)
        case tuple():
            return "-".join(map(str, value))
        case list():
            return shlex.quote(",".join(map(str, value)) + ("," if len(value) == 1 else ""))
        case str():
            return shlex.quote(value)
        case _:
            return str(value)


def _set_option(section: str, named: str, name: str, value: object) -> str:
    """`--set` for a setting of a stage or role."""
    return set_option(
        f"{section}.{named}.{'resources.' if name in RESOURCE_SETTINGS else ''}{name}", yaml_literal(value)
    )


def _default(name: str) -> object:
    item = STAGE_SETTINGS[name]
    return item.default_factory() if item.default_factory is not MISSING else item.default
