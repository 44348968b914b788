"""Structure of the code: imports, layers, the map in docs/architecture.md, dependencies and wording."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dovetail
from dovetail.error_codes import ERROR_CODES, error_codes_page

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "dovetail"
TESTS = ROOT / "tests"
THIS_FILE = Path(__file__).resolve()
PURE = (
    "errors.py",
    "text_format.py",
    "resources",
    "pipeline",
    "scheduling",
    "control",
    "streaming",
)
OUTSIDE = {
    "time",
    "random",
    "os",
    "threading",
    "multiprocessing",
    "subprocess",
    "socket",
    "asyncio",
    "pathlib",
    "psutil",
}


def _imports(path: Path) -> set[str]:
    """Top-level names of everything a module imports when it runs, so not what is there for type checkers."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        waiting += ast.iter_child_nodes(node)
    return found


def test_pure_packages_import_nothing_that_reaches_outside() -> None:
    modules = [
        path for name in PURE for path in ([SOURCE / name] if name.endswith(".py") else SOURCE.glob(f"{name}/**/*.py"))
    ]
    assert len(modules) > 10
    reaching = {path.name: sorted(_imports(path) & OUTSIDE) for path in modules}
    assert {name: found for name, found in reaching.items() if found} == {}


MUTATORS = frozenset(
    {
        "append",
        "appendleft",
        "clear",
        "extend",
        "extendleft",
        "insert",
        "pop",
        "popleft",
        "rotate",
        "setdefault",
        "update",
    }
)


def _attributes_defined_in(tree: ast.Module) -> set[str]:
    """Attributes that the classes of a module define: annotated in the class, listed in slots or assigned to self."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            found.add(node.attr)
    return found


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _changed_attributes(tree: ast.Module) -> list[ast.Attribute]:
    """Attributes that a module assigns, deletes or changes in place, of any object but self."""
    found: list[ast.Attribute] = []
    for node in ast.walk(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            target = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute) and not _is_self(target.value):
            found.append(target)
    return found


def _foreign_assignments(source: str) -> list[str]:
    """Assignments of a module to attributes of objects whose class it does not define, `self.other.x = ...` too."""
    tree = ast.parse(source)
    own = _attributes_defined_in(tree)
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in _changed_attributes(tree)
        if node.attr not in own or isinstance(node.value, ast.Attribute)
    ]


def test_state_of_the_controller_is_assigned_only_by_the_module_that_defines_it() -> None:
    modules = sorted((SOURCE / "streaming").glob("*.py"))
    assert len(modules) > 10
    foreign = {path.name: _foreign_assignments(path.read_text()) for path in modules}
    assert {name: found for name, found in foreign.items() if found} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "unit.finished = True",
        "unit.count += 1",
        "a, unit.finished = 1, 2",
        "state.dirty[unit.index] = True",
        "del state.workers[1]",
        "state.commands.append(1)",
        "self.fleet.mine = True",
        "for unit.finished in (1, 2): pass",
    ],
)
def test_an_assignment_to_state_of_another_module_is_found(statement: str) -> None:
    source = f"class Own:\n    def change(self, unit, state):\n        self.mine = 1\n        {statement}\n"
    assert len(_foreign_assignments(source)) == 1


def test_changes_of_own_state_and_of_local_values_are_allowed() -> None:
    source = (
        "class Own:\n    def change(self, other, found):\n        self.mine = other.mine = 1\n        found.append(2)\n"
    )
    assert _foreign_assignments(source) == []


def _title(path: Path) -> str:
    """First line of the docstring of a module; read by its first statement, because parsing all of src is slow."""
    begin = re.match(r'\A(?:#[^\n]*\n)*r?"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL)
    return begin[1].strip().split("\n")[0] if begin is not None else ""


def test_modules_that_call_themselves_pure_import_nothing_that_reaches_outside() -> None:
    pure = [path for path in SOURCE.rglob("*.py") if re.search(r"(^|[.:] )Pure[.:,]", _title(path))]
    assert len([path for path in pure if path.relative_to(SOURCE).parts[0] in ("actors", "jobs")]) >= 35
    reaching = {str(path.relative_to(SOURCE)): sorted(_imports(path) & OUTSIDE) for path in pure}
    assert {name: found for name, found in reaching.items() if found} == {}


def test_every_module_has_a_docstring_that_is_not_a_question() -> None:
    titles = {path: _title(path) for path in SOURCE.rglob("*.py")}
    assert (
        sorted(path.name for path, title in titles.items() if not title or title.endswith("?") or "? " in title) == []
    )


def test_the_map_names_every_package_and_every_package_is_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = re.search(r"```\nsrc/dovetail/\n(.*?)```", text, re.DOTALL)
    assert tree is not None
    on_map = set(re.findall(r"^[├└]── (\w+)(?:/|\.py)", tree[1], re.MULTILINE))
    in_code = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__pycache__"}
    assert on_map == in_code


def test_every_module_that_the_map_names_exists() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("architecture.md", "where-to-change-what.md"))
    modules = {path.name for path in (*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"))}
    named = set(re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", text))
    assert len(named) > 100
    assert sorted(named - modules) == []


OPERATORS = "recipes/operators/"
"""Modules that are found by the names of operators."""


def test_every_module_is_on_the_map_or_in_the_tables_of_what_to_change() -> None:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("architecture.md", "where-to-change-what.md"))
    words = set(re.findall(r"\w+", text))
    modules = [path.relative_to(SOURCE) for path in (*SOURCE.rglob("*.py"), *SOURCE.rglob("*.lua"))]
    unnamed = [
        str(path)
        for path in modules
        if path.stem not in words and path.stem != "__init__" and not str(path).startswith(OPERATORS)
    ]
    assert sorted(unnamed) == []


REJECTED_NAMES = re.compile(
    r"(?<!\w)_?(un)?([Ss]aid|[Tt]old|[Ll]ooks|[Pp]asses|[Hh]eard|nobody|everybody|whoever|anew)(?!\w)"
)
"""Names that are no terms: a value has the name of what it is, not of where it was mentioned."""


def test_names_in_the_code_are_terms() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"
        for path in (*SOURCE.rglob("*.py"), *TESTS.rglob("*.py"))
        if REJECTED_NAMES.search(path.read_text(encoding="utf-8"))  # most have none, and tokenizing is slow
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        if token.type == tokenize.NAME and REJECTED_NAMES.fullmatch(token.string)
    ]
    assert found == []


REJECTED_PHRASES = re.compile(
    r"\b(told|so many|goes on|nobody|anybody|everybody|somebody|whoever|those who"
    r"|mend(s|ed)?|in hand|for ever|anew|once more|gone on|go on with"
    r"|what comes of|of no (more )?use|in vain|stays behind)\b",
    re.IGNORECASE,
)
"""Phrases that the style rejects: they are not the words of technical documentation."""
PLAIN_PAGES = ("*.md", "docs/**/*.md", "examples/**/*.py", "examples/**/*.yaml")


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every comment, and of every string and name of several words; without the expressions in
    f-strings. Nothing of a file that has no rejected phrase at all: tokenizing is slow."""
    if not REJECTED_PHRASES.search(path.read_text(encoding="utf-8").replace("_", " ")):
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING) and " " in token.string:
                yield token.start[0], re.sub(r"\{[^{}]*\}", "{}", token.string)
            if token.type == tokenize.NAME and "_" in token.string:
                yield token.start[0], token.string.replace("_", " ")


def test_texts_of_the_code_are_in_plain_english() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase[0]}"
        for path in (*SOURCE.rglob("*.py"), *TESTS.rglob("*.py"))
        if path != THIS_FILE
        for line, text in _texts(path)
        for phrase in REJECTED_PHRASES.finditer(text)
    ]
    assert found == []


def test_pages_are_in_plain_english() -> None:
    pages = [path for pattern in PLAIN_PAGES for path in ROOT.glob(pattern)]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {phrase[0]}"
        for path in pages
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for phrase in REJECTED_PHRASES.finditer(line)
    ]
    assert found == []


def test_every_public_name_is_exported_and_nothing_else() -> None:
    assert sorted(dovetail.__all__) == sorted(dovetail._MODULE_BY_NAME)
    assert [name for name in dovetail.__all__ if getattr(dovetail, name).__name__ != name] == []
    with pytest.raises(AttributeError, match="Recources"):
        dovetail.__getattr__("Recources")


def test_the_table_of_error_codes_has_every_code_that_is_used_and_no_other() -> None:
    sources = [path for path in SOURCE.rglob("*.py") if path.name != "error_codes.py"]
    used = {code for path in sources for code in re.findall(r"\"(DT\d{3})[\" ]", path.read_text())}
    assert sorted(used) == list(ERROR_CODES)


def error_code_constants() -> Iterator[tuple[str, str]]:
    """Names and codes of the constants of modules that are error codes."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign):
                continue
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            for target, value in zip(targets, values, strict=False):
                code = value.value if isinstance(value, ast.Constant) else None
                if isinstance(target, ast.Name) and re.fullmatch(r"DT\d{3}", str(code)):
                    yield target.id, str(code)


def test_an_error_code_has_one_constant_name_and_a_name_one_code() -> None:
    constants = set(error_code_constants())
    assert len(constants) > 50
    for position in (0, 1):
        counts = Counter(pair[position] for pair in constants)
        assert [pair for pair in constants if counts[pair[position]] > 1] == []


def test_the_page_of_error_codes_is_the_generated_one() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert page == error_codes_page(), "python -m dovetail.error_codes > docs/errors.md"


def test_importing_dovetail_loads_nothing_heavy() -> None:
    heavy = ["numpy", "ray", "pydantic", "rich", "asyncio", "yaml", "psutil", "click"]
    code = f"import sys, dovetail; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"


def test_the_core_dependencies_are_the_agreed_ones() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[><=]", entry)[0] for entry in project["dependencies"]}
    assert names == {"click", "cloudpickle", "psutil", "pyyaml", "rich"}
    extras = {"ray", "redis", "tables", "lance", "gpu", "recipes", "files", "models", "dev"}
    assert set(project["optional-dependencies"]) == extras
    assert project["optional-dependencies"]["ray"][0].startswith("ray>")


def test_nothing_that_is_committed_names_a_package_index() -> None:
    files = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True, cwd=ROOT).stdout.split()
    spelled = "index" + "-url"
    naming = [name for name in files if spelled in (ROOT / name).read_text(errors="replace")]
    assert naming == []
