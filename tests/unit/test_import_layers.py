"""The architecture as a test: who imports whom, and what nobody may do."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import dist_aclgraph

PACKAGE = Path(dist_aclgraph.__file__).parent
NAME = "dist_aclgraph"

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"
TOP = "(top)"  # the files that lie beside the folders
UNPICKLERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


@dataclass(frozen=True)
class Row:
    """What the modules of one folder may import: other folders, and libraries."""

    folders: frozenset[str]
    libraries: frozenset[str]


def read_layers() -> dict[str, Row]:
    """Return the layer table of docs/architecture.md, one row a folder."""
    text = ARCHITECTURE.read_text(encoding="utf-8").partition("### Who may import whom")[2]
    rows = {}
    for line in re.findall(r"^\| `.*$", text.partition("\n#")[0], re.MULTILINE):
        folder, *cells = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:-1])
        rows[folder[0]] = Row(*map(frozenset, cells))
    return rows


LAYERS = read_layers()


@dataclass(frozen=True)
class Module:
    name: str  # without the package's own name, "" for the package itself
    tree: ast.Module

    @property
    def folder(self) -> str:
        return folder_of(self.name)


def folder_of(name: str) -> str:
    """Return the folder of a module or of what is imported from it, its name without ours."""
    first = name.partition(".")[0]
    return first if (PACKAGE / first).is_dir() else TOP


def modules() -> list[Module]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if not name:
            continue  # the package's face names what is public, from any folder
        found.append(Module(name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


MODULES = modules()
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every imported dotted name; of ``from a import b`` the longest, a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(module: Module) -> list[str]:
    """Return what a module imports against the table."""
    row = LAYERS[module.folder]
    bad = []
    for target in imports(module.tree):
        top, _, inner = target.partition(".")
        if top == NAME:
            allowed = folder_of(inner) in row.folders | {module.folder, TOP}
        else:
            allowed = top in row.libraries | sys.stdlib_module_names
        if not allowed:
            bad.append(target)
    return bad


def folders_by_imports() -> dict[str, set[str]]:
    """Return for each folder the other folders that its modules import."""
    found: dict[str, set[str]] = {folder: set() for folder in LAYERS}
    for module in MODULES:
        for target in imports(module.tree):
            top, _, inner = target.partition(".")
            if top == NAME:
                found[module.folder].add(folder_of(inner))
    return {folder: others - {folder} for folder, others in found.items()}


@each_module
def test_modules_import_only_what_their_folder_may(module: Module) -> None:
    assert violations(module) == []


def test_the_table_has_one_row_for_each_folder() -> None:
    folders = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}

    assert folders | {TOP} == set(LAYERS)


def test_no_folder_imports_one_that_imports_it() -> None:
    order = TopologicalSorter(folders_by_imports())

    assert set(order.static_order()) == set(LAYERS)


def test_the_table_allows_no_cycle() -> None:
    TopologicalSorter({folder: row.folders for folder, row in LAYERS.items()}).prepare()


# Programs that are run by their path import nothing of ours.
READERS_OF_THE_ENVIRONMENT = {"environment", "actors.worker_setup"}


@each_module
def test_the_environment_is_read_in_one_place_only(module: Module) -> None:
    if module.name in READERS_OF_THE_ENVIRONMENT:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {
                ("os", "environ"),
                ("os", "getenv"),
                ("os", "putenv"),
            }, f"line {node.lineno}"
    assert not {"os.environ", "os.getenv"} & set(imports(module.tree))


@each_module
def test_nothing_unpickles_or_evaluates(module: Module) -> None:
    assert not UNPICKLERS & {target.partition(".")[0] for target in imports(module.tree)}
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name):
            assert function.id not in {"eval", "exec", "__import__"}, f"line {node.lineno}"
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            called = (function.value.id, function.attr)
            assert called not in {("torch", "load"), ("np", "load"), ("numpy", "load")}


# Ray says in no other way with which program it starts workers.
ASSIGNED = {("actors.local_ray", "ray_constants")}


@each_module
def test_foreign_attributes_are_not_assigned(module: Module) -> None:
    imported = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    for line, root in assigned_roots(module.tree):
        is_known = (module.name, root) in ASSIGNED
        assert root not in imported or is_known, f"line {line} assigns an attribute of {root}"


def assigned_roots(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name for each assignment to an attribute reached from that name."""
    for node in ast.walk(tree):
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


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kv.spec", "import torch"),
        ("config", "from dist_aclgraph.kv.cache_spec import KVCacheSpec"),
        ("device.npu", "from dist_aclgraph.planning.plan import GraphPlan"),
        ("graphs.pieces", "from dist_aclgraph.scheduler.scheduler import Scheduler"),
        ("engine.runner", "import ray"),
        ("engine.runner", "def f():\n    import torch_npu.npu"),
        ("serve.app", "from torch import nn"),
        ("simulate.group", "import ray"),
        ("simulate.group", "import torch"),
        ("actors.worker", "from dist_aclgraph.serve import app"),
    ],
)
def test_the_walk_finds_a_forbidden_import(name: str, source: str) -> None:
    assert violations(Module(name, ast.parse(source)))


def test_the_walk_finds_a_foreign_assignment() -> None:
    tree = ast.parse("import torch.nn\ntorch.nn.Linear = None\nsetattr(torch, 'x', 1)")

    assert sorted(assigned_roots(tree)) == [(2, "torch"), (3, "torch")]
