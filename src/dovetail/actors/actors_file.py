"""Read actors files.

name: rl
pools: {gpu: {labels: {pool: gpu}}}
roles:
  - {name: rollout, cls: "my_package.rl:Rollout", profile: rollout, workers: [2, 8], scale: {target: 4}}
  - {name: trainer, cls: "my_package.rl:Trainer", profile: trainer, pool: gpu, after: [rollout]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dovetail.actors.colocation import make_bundles, start_cycles
from dovetail.actors.role import Affinity, Health, Pool, Restart, Role, Scale, Together
from dovetail.actors.role_fields import AFFINITY, HEALTH, POOL, RECORDS, RESTART, ROLE, SCALE, TOGETHER
from dovetail.actors.role_problems import system_problems
from dovetail.actors.role_profiles import complete_role
from dovetail.actors.simulation_fields import (
    CLIENT,
    EXAMPLE_SIMULATION,
    METHOD,
    SIMULATION,
    SIMULATION_VALUE,
    STORE,
    simulation_problems,
)
from dovetail.documents.document import Document, KeyPath, dotted_path
from dovetail.documents.fields import (
    Field,
    Record,
    Schema,
    WrongValue,
    file_problem,
    list_of,
    mapping_of,
    record_type,
)
from dovetail.documents.parser import read_document
from dovetail.documents.yaml_writer import YAML
from dovetail.pipeline.file_reader import FileReader
from dovetail.pipeline.overrides import override_values
from dovetail.pipeline.stage_fields import NAME
from dovetail.resources.resources import RESOURCES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dovetail.documents.fields import Located
    from dovetail.errors import Fix, Problem

EXAMPLE_ROLE = {"name": "trainer", "cls": "my_package.my_module:Trainer"}
EXAMPLE_FILE = {"roles": [EXAMPLE_ROLE]}
EXAMPLE_POOL = {"labels": {"pool": "gpu"}}
OBJECTS = {"together": Together, "affinity": Affinity, "restart": Restart, "health": Health, "scale": Scale}
"""Keys of a role whose value is a mapping in a file and an object in Python."""
MAY_BE_TEXT = ("together", "restart")

ROLES = list_of(replace(record_type(ROLE, EXAMPLE_ROLE), schema={"$ref": "#/$defs/role"}), "a list of [roles](#role)")
POOLS = mapping_of(
    replace(record_type(POOL, EXAMPLE_POOL), schema={"$ref": "#/$defs/pool"}),
    "names of [pools](#pool)",
    {"gpu": EXAMPLE_POOL},
)
ACTORS_FILE = Record(
    "Actors file",
    "The roles of an actor system, and the pools that they run in.",
    (
        Field("name", NAME, "Name of the system.", "actors"),
        Field("roles", replace(ROLES, schema={**ROLES.schema, "minItems": 1}), "The roles.", required=True),
        Field("pools", POOLS, "Named parts of the cluster."),
        Field("simulate", SIMULATION_VALUE, "Call pattern and service times for `dovetail simulate`."),
    ),
)
FILE_RECORDS = (ACTORS_FILE, ROLE, TOGETHER, AFFINITY, POOL, SCALE, RESTART, HEALTH, SIMULATION, CLIENT, METHOD, STORE)


def schema() -> Schema:
    """The JSON Schema of an actors file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Dovetail actors",
        **ACTORS_FILE.schema(),
        "$defs": {"role": ROLE.schema(), "pool": POOL.schema(), "resources": RESOURCES.schema()},
    }


@dataclass(frozen=True, slots=True)
class ParsedActorsFile:
    """An actors file as far as it could be read, and all problems in it."""

    document: Document
    name: str
    roles: tuple[Role, ...]
    pools: Mapping[str, Pool]
    problems: tuple[Problem, ...]
    simulation: Mapping[str, Any] | None = None
    """Data of the key `simulate`."""

    def located(self, problem: Problem) -> Problem:
        """A problem of the system with the line of its role, and with fixes as lines of the file."""
        return replace(problem, place=self.document.place(self._path(problem)), fixes=YAML.fixes(problem))

    def _path(self, problem: Problem) -> KeyPath:
        names = problem.subject.names if problem.subject is not None else ()
        for number, role in enumerate(self.roles):
            together = role.colocation
            if role.name in names or (together is not None and together.group in names):
                return ("roles", number)
        return ("roles",)


def read_actors_file(path: str | Path, sets: Sequence[str] = ()) -> ParsedActorsFile:
    """`sets`: values of the command line (`--set roles.rollout.workers=4`)."""
    document = read_document(path)
    return _ActorsFileReader(override_values(document, sets) if sets else document).file()


def parse_actors_data(data: object) -> ParsedActorsFile:
    return _ActorsFileReader(Document("actors", data)).file()


def find_problems(roles: Sequence[object], pools: Mapping[str, object], name: object) -> list[Located]:
    """All problems of a system, with their paths in a file; those of groups if the roles are sound."""
    found = system_problems(roles, pools, name)
    if found:
        return found
    sound = [complete_role(role, pools) for role in roles if isinstance(role, Role)]
    known = {name: pool for name, pool in pools.items() if isinstance(pool, Pool)}
    problems = [*make_bundles(sound, known)[1], *start_cycles(sound)]
    return [(_path_of_group(problem, sound), problem) for problem in problems]


def _path_of_group(problem: Problem, roles: Sequence[Role]) -> KeyPath:
    names = problem.subject.names if problem.subject is not None else ()
    for number, role in enumerate(roles):
        if role.colocation is not None and role.colocation.group in names:
            return ("roles", number, "together")
    return ("roles",)


class _ActorsFileReader(FileReader):
    def file(self) -> ParsedActorsFile:
        top = self.mapping((), self.document.data, ACTORS_FILE, EXAMPLE_FILE)
        entries = top.get("roles", ())
        if not isinstance(entries, list | tuple):
            self.report(("roles",), WrongValue(entries, "a list", instead=([EXAMPLE_ROLE],)))
            entries = ()
        roles = tuple(self._role(number, entry) for number, entry in enumerate(entries))
        pools = self._pools(top.get("pools", {}))
        name = top.get("name", "actors")
        formless = not roles and bool(self.problems)
        for path, problem in find_problems(roles, pools, name):
            if self.was_given(path) and not (formless and path == ("roles",)):
                self.add(path, problem)
        simulation = self._simulation(top["simulate"], roles) if "simulate" in top else None
        problems = self.sorted_problems()
        return ParsedActorsFile(self.document, name, roles, pools, problems, simulation)

    def _simulation(self, entry: object, roles: Sequence[Role]) -> Mapping[str, Any] | None:
        if not isinstance(entry, Mapping):
            self.report(("simulate",), WrongValue(entry, "a mapping", instead=(EXAMPLE_SIMULATION,)))
            return None
        mistakes = list(SIMULATION.mistakes(entry))
        for mistake in mistakes:
            problem = file_problem(replace(mistake, path=("simulate", *mistake.path)))
            self.problems.append(replace(problem, place=self.document.place(("simulate", *mistake.path))))
        if not self.problems:
            for path, problem in simulation_problems(entry, roles):
                self.add(("simulate", *path), problem)
        return entry

    def _role(self, number: int, entry: object) -> Role:
        path = ("roles", number)
        values = self.mapping(path, entry, ROLE, EXAMPLE_ROLE)
        name = values.get("name")
        called = f"role {name!r}" if isinstance(name, str) else dotted_path("", path)
        if values.get("resources") is not None:
            values["resources"] = self.resources((*path, "resources"), values["resources"], called)
        for key, kind in OBJECTS.items():
            value, example = values.get(key), ROLE.by_name[key].type.example
            if value is None or (isinstance(value, str) and key in MAY_BE_TEXT):
                continue
            if isinstance(value, Mapping) or key not in MAY_BE_TEXT:
                values[key] = self._object((*path, key), value, kind, example)
            else:
                self.report((*path, key), WrongValue(value, "a text or a mapping", instead=(example,)))
                values[key] = None
            if values[key] is None:
                del values[key]
        if isinstance(values.get("workers"), list):
            values["workers"] = tuple(values["workers"])
        self.given[number] = set(values)
        return Role(**{"name": None, "cls": None, **values})

    def _pools(self, entries: object) -> dict[str, Pool]:
        if not isinstance(entries, Mapping):
            self.report(("pools",), WrongValue(entries, "a mapping", instead=({"gpu": EXAMPLE_POOL},)))
            return {}
        found = {name: self._object(("pools", name), entry, Pool, EXAMPLE_POOL) for name, entry in entries.items()}
        return {str(name): pool or Pool() for name, pool in found.items()}

    def _object(self, path: KeyPath, entry: object, kind: type, example: object) -> Any:
        """The object of a mapping; None if it has mistakes, which are reported."""
        before = len(self.problems)
        record = RECORDS[kind]
        known = self.mapping(path, entry, record, example)
        for name, mistake in record.value_mistakes(known):
            self.report((*path, name, *mistake.path), mistake)
        return kind(**known) if len(self.problems) == before else None

    def fixes(self, path: KeyPath, problem: Problem) -> tuple[Fix, ...]:
        if path == ("roles",) and not self.given:
            return (YAML.assignment("roles", [EXAMPLE_ROLE]),)
        return super().fixes(path, problem)
