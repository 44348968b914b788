"""Code of roles, checked before anything starts: classes, their arguments, and the methods that are signals."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dovetail.actors.instance_directory import RoleMethods
from dovetail.actors.role_fields import BAD_ROLE
from dovetail.actors.role_problems import UNKNOWN_NAME
from dovetail.actors.scale_signal import OUTSTANDING, signal_parts
from dovetail.engines.object_loader import import_object
from dovetail.errors import Change, DovetailError, Problem, Subject, did_you_mean, nearest_word

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dovetail.actors.role import Role

MAX_SIGNATURE_CHARACTERS = 200


class RoleCode(NamedTuple):
    """Methods of the classes of a system, and problems of their code."""

    methods: Mapping[str, RoleMethods]
    """Methods of the class by role; unknown if the class cannot be imported here."""
    problems: Sequence[Problem]


def inspect_roles(roles: Sequence[Role], *, is_local: bool) -> RoleCode:
    """Import the classes of all roles. `is_local`: workers import what this process can import; on other machines they
    may have packages that are missing here."""
    methods, problems = {}, []
    for role in roles:
        try:
            target: Any = (
                import_object(role.cls, f"role {role.name!r}: cls=") if isinstance(role.cls, str) else role.cls
            )
        except DovetailError as error:
            methods[role.name] = RoleMethods(None)
            problems += [_with_fix(role, problem) for problem in error.problems] if is_local else []
        except Exception:  # of the user's module: variables that only workers have may be missing
            methods[role.name] = RoleMethods(None)
        else:
            methods[role.name] = RoleMethods.of(target)
            problems += _argument_problems(role, target)
    for role in roles:
        problems += _signal_problems(role, methods)
    return RoleCode(methods, problems)


def _with_fix(role: Role, problem: Problem) -> Problem:
    fixes = problem.fixes or ("name a class, or a function that returns an object, in a module that can be imported",)
    return replace(problem, fixes=fixes, subject=Subject("role", role.name))


def _argument_problems(role: Role, target: Any) -> list[Problem]:
    """Arguments with which the object cannot be made."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return []  # of an extension module
    try:
        signature.bind(*role.args, **role.kwargs)
    except TypeError as error:
        name = getattr(target, "__name__", "cls")
        message = f"role {role.name!r}: {name}() cannot be called with its args and kwargs: {error}"
        shown = f"{name}{signature}"[:MAX_SIGNATURE_CHARACTERS]
        return [Problem(BAD_ROLE, message, (shown,), (f"args and kwargs for {shown}",), subject=_subject(role))]
    return []


def _signal_problems(role: Role, methods: Mapping[str, RoleMethods]) -> list[Problem]:
    """A signal that is not a method of its role."""
    if role.scale is None or not isinstance(role.scale.signal, str) or role.scale.signal == OUTSTANDING:
        return []
    of, name = signal_parts(role)
    known = methods[of].names
    if name == OUTSTANDING or known is None or name in known:
        return []
    near = nearest_word(name, sorted(known))
    message = (
        f"role {role.name!r}: its signal {name!r} is not a method of role {of!r}{did_you_mean(name, sorted(known))}"
    )
    evidence = (f"methods: {', '.join(sorted(known)) or 'none'}",)
    fix = Change({"signal": near if of == role.name else f"{of}.{near}"}) if near else f"define {name}() in its class"
    return [Problem(UNKNOWN_NAME, message, evidence, (fix,), subject=_subject(role))]


def _subject(role: Role) -> Subject:
    return Subject("role", role.name)
