"""Rules of the architecture: the imports that each folder may have, and calls that no module may
make.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import dist_aclgraph

PACKAGE = Path(dist_aclgraph.__file__).parent
NAME = "dist_aclgraph"

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"
TOP = "(top)"  # row of the layer table for modules outside of folders, and for the names in OF_TOP
OF_TOP = ("config", "arrays", "files")
ROOT = PACKAGE.parent
BESIDE = ("benchmarks", "tools")  # folders outside the package, which are not shipped with it


@dataclass(frozen=True)
class Row:
    """A row of the layer table: the folders and libraries that the modules of one folder may
    import.
    """

    folders: frozenset[str]
    libraries: frozenset[str]


def read_layers() -> dict[str, Row]:
    """Return the layer table of docs/architecture.md. A row without a folder continues the previous
    row.
    """
    text = ARCHITECTURE.read_text(encoding="utf-8").partition("### Who may import whom")[2]
    rows: dict[str, Row] = {}
    folder = ""
    for line in re.findall(r"^\| [`|].*$", text.partition("\n#")[0], re.MULTILINE):
        name, *cells = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1])
        folder = name[0] if name else folder
        before = rows.get(folder, Row(frozenset(), frozenset()))
        folders, libraries = map(frozenset, cells)
        rows[folder] = Row(before.folders | folders, before.libraries | libraries)
    return {
        folder: Row(with_inner(row.folders, rows), row.libraries) for folder, row in rows.items()
    }


def with_inner(folders: Iterable[str], rows: Iterable[str]) -> frozenset[str]:
    """Return the names of the rows for ``folders`` and for their inner folders."""
    return frozenset(
        row for folder in folders for row in rows if row == folder or row.startswith(f"{folder}/")
    )


LAYERS = read_layers()


@dataclass(frozen=True)
class Module:
    name: str  # dotted name, without the package's name
    tree: ast.Module
    is_face: bool = False  # whether the module is an __init__.py

    @property
    def folder(self) -> str:
        return folder_of(self.name)


def folder_of(name: str) -> str:
    """Return the folder of a module, without the package's name. ``name`` may also be a name that
    is imported from the module.

    If an inner folder has a row of its own, the inner folder is returned.
    """
    first, second = [*name.split("."), ""][:2]
    if f"{first}/{second}" in LAYERS:
        return f"{first}/{second}"
    is_folder = first in BESIDE or (first not in OF_TOP and (PACKAGE / first).is_dir())
    return first if is_folder else TOP


def imported_folder(target: str) -> str | None:
    """Return the folder of an imported module; None if the module belongs to a library."""
    top, _, inner = target.partition(".")
    if top in BESIDE:
        return top
    return folder_of(inner) if top == NAME else None


@cache
def modules() -> list[Module]:
    found = []
    for base, folder in ((PACKAGE, PACKAGE), *((ROOT, ROOT / name) for name in BESIDE)):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            if not name:
                continue  # the package's __init__ may import public names from any folder
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found.append(Module(name, tree, path.name == "__init__.py"))
    return found


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the syntax nodes that the rules check."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Call)
    return tuple(node for node in ast.walk(tree) if isinstance(node, kinds))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield, for every import, its line and its dotted name; ``from a import b`` gives a.b."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (f"{node.module}." if node.module else "")
            yield from ((node.lineno, f"{source}{alias.name}") for alias in node.names)


def names_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield, for each ``name.attribute`` and for every import, its line and its dotted name."""
    yield from imports(tree)
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"


def names_called(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield, for each call of ``name`` or ``name.attribute``, its line and its dotted name."""
    for node in nodes(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            yield node.lineno, f"{node.func.value.id}.{node.func.attr}"


def assigned_roots(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield, for each assignment to an attribute (``name.a.b =...``), its line and ``name``."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            root: ast.expr = node
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name):
                yield node.lineno, root.id
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            target = node.args[0] if node.args else None
            if node.func.id in {"setattr", "delattr"} and isinstance(target, ast.Name):
                yield node.lineno, target.id


# ---- rules for one module; a rule yields each line that breaks the rule, with the reason

Rule = Callable[[Module], Iterator[tuple[int, str]]]

# Modules that may read the environment. A module that runs as a script cannot import the module
# ``environment``.
READERS_OF_THE_ENVIRONMENT = {"environment", "actors.forks.worker_setup"}
ENVIRONMENT = {"os.environ", "os.getenv", "os.putenv"}
UNPICKLERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
EVALUATORS = {"eval", "exec", "__import__"}
LOADERS_THAT_UNPICKLE = {"torch.load", "np.load", "numpy.load"}
# Modules that may assign attributes of Ray. Ray has no option for the program that starts workers,
# and no option that keeps errors of processes away from stdout.
ASSIGNED = {
    ("actors.forks.forking_starter", "ray_constants"),
    ("actors.cluster.local_ray", "ray_worker"),
}


def relative_imports(module: Module) -> Iterator[tuple[int, str]]:
    return ((line, target) for line, target in imports(module.tree) if target.startswith("."))


def imports_against_the_table(module: Module) -> Iterator[tuple[int, str]]:
    row = LAYERS.get(module.folder, Row(frozenset(), frozenset()))
    for line, target in imports(module.tree):
        folder = imported_folder(target)
        if folder is not None:
            allowed = folder in row.folders | {module.folder, TOP}
        else:
            allowed = target.partition(".")[0] in row.libraries | sys.stdlib_module_names
        if not allowed:
            yield line, target


def reads_of_the_environment(module: Module) -> Iterator[tuple[int, str]]:
    if module.name not in READERS_OF_THE_ENVIRONMENT:
        yield from (use for use in names_used(module.tree) if use[1] in ENVIRONMENT)


def imports_of_unpicklers(module: Module) -> Iterator[tuple[int, str]]:
    return (use for use in imports(module.tree) if use[1].partition(".")[0] in UNPICKLERS)


def evaluations(module: Module) -> Iterator[tuple[int, str]]:
    return (call for call in names_called(module.tree) if call[1] in EVALUATORS)


def loads_that_unpickle(module: Module) -> Iterator[tuple[int, str]]:
    return (call for call in names_called(module.tree) if call[1] in LOADERS_THAT_UNPICKLE)


def assignments_to_foreign_attributes(module: Module) -> Iterator[tuple[int, str]]:
    imported = set()
    for node in nodes(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    for line, root in assigned_roots(module.tree):
        if root in imported and (module.name, root) not in ASSIGNED:
            yield line, f"an attribute of {root}"


def assert_none(rule: Rule) -> None:
    """Fail if a line of code breaks the rule. The message lists all such lines."""
    found = [f"{m.name}:{line}: {what}" for m in modules() for line, what in rule(m)]
    assert not found, "\n".join([rule.__name__.replace("_", " "), *found])


def test_imports_are_absolute() -> None:
    assert_none(relative_imports)


def test_modules_import_only_what_their_folder_may() -> None:
    assert_none(imports_against_the_table)


def test_the_environment_is_read_in_one_place_only() -> None:
    assert_none(reads_of_the_environment)


def test_nothing_imports_what_unpickles() -> None:
    assert_none(imports_of_unpicklers)


def test_nothing_evaluates_code() -> None:
    assert_none(evaluations)


def test_nothing_loads_by_unpickling() -> None:
    assert_none(loads_that_unpickle)


def test_foreign_attributes_are_not_assigned() -> None:
    assert_none(assignments_to_foreign_attributes)


BROKEN: tuple[tuple[Rule, str, str], ...] = (
    (relative_imports, "kv.spec", "from . import blocks"),
    (relative_imports, "kv.spec", "from ..shapes import model_spec"),
    (imports_against_the_table, "kv.spec", "import torch"),
    (
        imports_against_the_table,
        "config.tree",
        "from dist_aclgraph.kv.cache_spec import KVCacheSpec",
    ),
    (imports_against_the_table, "device.npu", "from dist_aclgraph.planning.plan import GraphPlan"),
    (
        imports_against_the_table,
        "graphs.pieces",
        "from dist_aclgraph.scheduler.scheduler import Scheduler",
    ),
    (imports_against_the_table, "engine.runner", "import ray"),
    (imports_against_the_table, "engine.runner", "def f():\n    import torch_npu.npu"),
    (imports_against_the_table, "serve.app", "from torch import nn"),
    (imports_against_the_table, "simulate.group", "import ray"),
    (imports_against_the_table, "simulate.group", "import torch"),
    (imports_against_the_table, "actors.worker.worker", "from dist_aclgraph.serve import app"),
    (
        imports_against_the_table,
        "actors.wire.sockets",
        "from dist_aclgraph.actors.client import outage",
    ),
    (imports_against_the_table, "actors.worker.worker", "from benchmarks.common import workload"),
    (imports_against_the_table, "cli.main", "import tools.chaos.rig"),
    (imports_against_the_table, "benchmarks.serve", "from tools.chaos.service import Service"),
    (reads_of_the_environment, "config", "import os\nos.environ['A']"),
    (reads_of_the_environment, "config", "import os\nos.getenv('A')"),
    (reads_of_the_environment, "config", "import os\nos.putenv('A', 'b')"),
    (reads_of_the_environment, "config", "from os import environ"),
    (imports_of_unpicklers, "config", "from pickle import loads"),
    (evaluations, "config", "def f(x):\n    return eval(x)"),
    (loads_that_unpickle, "engine.runner", "import torch\ntorch.load('x')"),
    (assignments_to_foreign_attributes, "engine.runner", "import torch.nn\ntorch.nn.Linear = 1"),
    (assignments_to_foreign_attributes, "engine.runner", "import torch\nsetattr(torch, 'x', 1)"),
    (assignments_to_foreign_attributes, "engine.runner", "import torch as t\ndel t.x"),
)


def test_each_rule_finds_what_breaks_it() -> None:
    unseen = [
        f"{rule.__name__}: {source}"
        for rule, name, source in BROKEN
        if not list(rule(Module(name, ast.parse(source))))
    ]

    assert not unseen, "\n".join(unseen)


# ---- rules of the table


def folders_by_imports() -> dict[str, set[str]]:
    """Return, for each folder, the other folders from which its modules import."""
    found: dict[str, set[str]] = {folder: set() for folder in LAYERS}
    for module in (module for module in modules() if module.folder in LAYERS):
        for _, target in imports(module.tree):
            if (folder := imported_folder(target)) is not None:
                found[module.folder].add(folder)
    return {folder: others - {folder} for folder, others in found.items()}


def test_the_table_has_one_row_for_each_folder() -> None:
    assert {module.folder for module in modules() if not module.is_face} == set(LAYERS)


def test_no_folder_imports_one_that_imports_it() -> None:
    order = TopologicalSorter(folders_by_imports())

    assert set(order.static_order()) == set(LAYERS)


def test_the_table_allows_no_cycle() -> None:
    TopologicalSorter({folder: row.folders for folder, row in LAYERS.items()}).prepare()
