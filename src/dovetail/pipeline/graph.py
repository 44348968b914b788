"""The graph of stages: edges, topological order, cycles and other mistakes."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from dovetail.documents.fields import Located, setting_problem
from dovetail.errors import UNSET, Change, Problem, did_you_mean, short_repr
from dovetail.pipeline.stage import Stage
from dovetail.pipeline.stage_fields import AFTER_NOTHING, NAME, NAME_LIMIT, quote_value, stage_problems

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

Edges = dict[str, tuple[str, ...]]

PIPELINE_EXAMPLE = 'dt.Pipeline([dt.Stage("read", "my_package.my_module:read")])'


def pipeline_problems(stages: Sequence[object], name: object) -> list[Located]:
    """All problems of these stages as a pipeline."""
    found: list[Located] = [
        (("name",), setting_problem("name", mistake, "DT034", "pipeline")) for mistake in NAME.check(name)
    ]
    if not stages:
        fixes = (f"write at least one: {PIPELINE_EXAMPLE}",)
        found.append((("stages",), Problem("DT030", "a pipeline without stages does nothing", fixes=fixes)))
    for number, stage in enumerate(stages):
        if isinstance(stage, Stage):
            wrong = stage_problems(stage, _stage_label(stage, number))
            found += [(("stages", number, field), problem) for field, problem in wrong]
        else:
            message = f"stage {number + 1}: {short_repr(stage)} is not a dt.Stage or a function"
            found.append((("stages", number), Problem("DT034", message, fixes=(PIPELINE_EXAMPLE,))))
    usable = {number: stage for number, stage in enumerate(stages) if isinstance(stage, Stage)}
    named = {number: stage for number, stage in usable.items() if _is_named(stage)}
    names = list(dict.fromkeys(stage.name for stage in named.values()))
    return [*found, *_duplicate_names(named), *_after(usable, names), *_cycles(named)]


def _is_named(stage: Stage) -> bool:
    name: object = stage.name
    return isinstance(name, str) and name != ""


def _stage_label(stage: Stage, number: int) -> str:
    return f"stage {short_repr(stage.name)}" if _is_named(stage) else f"stage {number + 1}"


def format_names(names: Iterable[str]) -> str:
    text = f"stages: {', '.join(names)}"
    return text if len(text) <= 300 else f"{text[:297]}..."


def stage_edges(stages: Sequence[Stage]) -> Edges:
    """The stages that each stage gets items from."""
    before = [(), *((stage.name,) for stage in stages)]
    return {
        stage.name: before[number] if stage.after is None else tuple(_names_in(stage).values())
        for number, stage in enumerate(stages)
    }


def reverse_edges(edges: Mapping[str, tuple[str, ...]]) -> Edges:
    children: dict[str, list[str]] = {name: [] for name in edges}
    for name, parents in edges.items():
        for parent in parents:
            children[parent].append(name)
    return {name: tuple(found) for name, found in children.items()}


def topological_order(edges: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Names in topological order, otherwise as given; stages in or behind a cycle are left out."""
    position = {name: number for number, name in enumerate(edges)}
    names = list(edges)
    children = reverse_edges(edges)
    missing = {name: len(parents) for name, parents in edges.items()}
    ready = [position[name] for name, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for child in children[name]:
            missing[child] -= 1
            if not missing[child]:
                heapq.heappush(ready, position[child])
    return order


def _duplicate_names(stages: Mapping[int, Stage]) -> Iterator[Located]:
    first: dict[str, int] = {}
    names = {stage.name for stage in stages.values()}
    for number, stage in stages.items():
        if stage.name not in first:
            first[stage.name] = number
            continue
        base = stage.name[: NAME_LIMIT - 8]
        free = next(f"{base}_{n}" for n in range(2, len(stages) + 3) if f"{base}_{n}" not in names)
        names.add(free)
        message = f"stages {first[stage.name] + 1} and {number + 1} are both called {short_repr(stage.name)}"
        yield ("stages", number, "name"), Problem("DT031", message, fixes=(Change({"name": free}),))


def _after(stages: Mapping[int, Stage], names: list[str]) -> Iterator[Located]:
    """Entries of `after` that are not a stage, are the stage itself, or are duplicates."""
    for number, stage in stages.items():
        given = _names_in(stage)
        good = [name for name in dict.fromkeys(given.values()) if name in names and name != stage.name]
        for entry, name in given.items():
            path = ("stages", number, "after", entry)
            if name == stage.name:
                message = f"stage {short_repr(name)} comes after itself: {name} -> {name}"
                yield path, Problem("DT033", message, fixes=_fixes(good, number))
            elif name not in names:
                near = did_you_mean(name, [other for other in names if other != stage.name])
                meant = [*good, near.split("'")[1]] if near else good
                message = f"{_stage_label(stage, number)}: after names {short_repr(name)}, which is no stage{near}"
                fixes = _fixes(list(dict.fromkeys(meant)), number)
                yield path, Problem("DT032", message, evidence=(format_names(names),), fixes=fixes)
            elif name in list(given.values())[: list(given).index(entry)]:
                message = f"{_stage_label(stage, number)}: after names {short_repr(name)} twice"
                yield path, Problem("DT034", message, fixes=_fixes(good, number))


def _names_in(stage: Stage) -> dict[int, str]:
    after: object = stage.after
    if not isinstance(after, tuple):
        return {}
    return {entry: name for entry, name in enumerate(after) if isinstance(name, str)}


def _fixes(names: list[str], number: int) -> tuple[Change, ...]:
    if names:
        return (Change({"after": names}),)
    follow = Change({"after": UNSET}, note=f"the stage then follows stage {number}")
    return (follow, AFTER_NOTHING) if number else (AFTER_NOTHING,)


def _cycles(stages: Mapping[int, Stage]) -> Iterator[Located]:
    number_of = {stage.name: number for number, stage in reversed(list(stages.items()))}
    kept = [stages[number] for number in sorted(number_of.values())]
    edges = {
        name: tuple(parent for parent in dict.fromkeys(parents) if parent in number_of and parent != name)
        for name, parents in stage_edges(kept).items()
    }
    for ring in find_cycles(edges):
        head = ring[0]
        given = _names_in(stages[number_of[head]])
        entry = next(entry for entry, name in given.items() if name == ring[-1])
        rest = [name for name in given.values() if name != ring[-1]]
        message = f"the stages form a cycle: {' -> '.join([*ring, head])}"
        evidence = (f"stage {short_repr(head)} has after={quote_value([*given.values()])}",)
        problem = Problem("DT033", message, evidence=evidence, fixes=(Change({"after": rest}),))
        yield ("stages", number_of[head], "after", entry), problem


def find_cycles(edges: Edges) -> Iterator[list[str]]:
    """One cycle after another, each name in at most one of them: every name is followed by one that has it as parent.
    A cycle begins with the name that comes first in `edges`."""
    position = {name: number for number, name in enumerate(edges)}
    while edges := _only_cycles(edges):
        children = reverse_edges(edges)
        walk = [next(iter(edges))]
        while walk.count(walk[-1]) == 1:
            walk.append(children[walk[-1]][0])
        ring = walk[walk.index(walk[-1]) : -1]
        head = ring.index(min(ring, key=position.__getitem__))
        yield ring[head:] + ring[:head]
        edges = _among([name for name in edges if name not in ring], edges)


def _only_cycles(edges: Edges) -> Edges:
    """Stages that remain after repeated removal of stages without parents or without children."""
    forward = set(topological_order(edges))
    rest = _among([name for name in edges if name not in forward], edges)
    backward = set(topological_order(reverse_edges(rest)))
    return _among([name for name in rest if name not in backward], rest)


def _among(names: Sequence[str], edges: Edges) -> Edges:
    kept = set(names)
    return {name: tuple(parent for parent in edges[name] if parent in kept) for name in names}
