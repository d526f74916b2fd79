"""The architecture as a test: who imports whom, and what nobody may do."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import dist_aclgraph

PACKAGE = Path(dist_aclgraph.__file__).parent
NAME = "dist_aclgraph"

# Longest prefix wins; the table of docs/architecture.md.
LAYERS = {
    "errors": 0,
    "config": 0,
    "environment": 0,
    "topology": 0,
    "sampling": 0,
    "model_facts": 0,
    "kv": 1,
    "scheduler": 1,
    "graph": 3,
    "graph.buckets": 1,
    "graph.budget": 1,
    "graph.choice": 1,
    "graph.commands": 1,
    "graph.descriptor": 1,
    "graph.dispatcher": 1,
    "graph.draft_places": 1,
    "graph.exchange": 1,
    "graph.lazy": 1,
    "graph.ledger": 1,
    "graph.negotiation": 1,
    "graph.mc2": 1,
    "graph.memory": 1,
    "graph.modes": 1,
    "graph.padding": 1,
    "graph.plan": 1,
    "graph.rebucketing": 1,
    "graph.traffic": 1,
    "device": 2,
    "comm": 2,
    "text": 2,
    "layers": 3,
    "models": 3,
    "models.activation_sizes": 1,
    "models.quantised_formats": 1,
    "models.spec": 1,
    "models.weight_sizes": 1,
    "engine": 4,
    "actors": 5,
    "serve": 6,
    "simulate": 6,
    "cli": 6,
    "bench": 6,
}
# The messages and modes between engine and workers are everyone's, the scheduler is not.
CONTRACTS = ("scheduler.step",)
PURE = {"msgspec", "numpy", "pydantic", "yaml"}  # and the standard library, in layers 0 and 1
UNPICKLERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


@dataclass(frozen=True)
class Module:
    name: str  # without the package's own name, "" for the package itself
    tree: ast.Module

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def modules() -> list[Module]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found.append(Module(name, ast.parse(path.read_text(encoding="utf-8"))))
    return found


MODULES = modules()
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name or NAME)


def layer_of(name: str) -> int | None:
    """Return the layer of a module, None where the table does not list it."""
    while name:
        if name in LAYERS:
            return LAYERS[name]
        name = name.rpartition(".")[0]
    return None


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
    layer = layer_of(module.name)
    if layer is None:
        return []
    bad = []
    for target in imports(module.tree):
        top, _, inner = target.partition(".")
        if top == NAME:
            other = layer_of(inner)
            if other is None or inner.startswith(CONTRACTS):
                continue
            sideways = (layer == 2 and other == 1) or (layer == 3 and inner.startswith("scheduler"))
            if other > layer or sideways:
                bad.append(target)
        elif (
            (top == "torch_npu" and module.top != "device")
            or (top == "ray" and layer < 5)
            or (top == "ray" and module.top == "simulate")
            or (top == "torch" and module.top in ("serve", "text", "simulate"))
            or (layer < 2 and top not in PURE | sys.stdlib_module_names)
        ):
            bad.append(target)
    return bad


@each_module
def test_modules_import_only_what_their_layer_allows(module: Module) -> None:
    assert violations(module) == []


def test_every_module_belongs_to_a_layer() -> None:
    assert [m.name for m in MODULES if m.name and layer_of(m.name) is None] == []


@each_module
def test_the_environment_is_read_in_one_place_only(module: Module) -> None:
    if module.name == "environment":
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


@each_module
def test_foreign_attributes_are_not_assigned(module: Module) -> None:
    imported = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    for line, root in assigned_roots(module.tree):
        assert root not in imported, f"line {line} assigns an attribute of {root}"


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
        ("config", "from dist_aclgraph.kv.spec import KVCacheSpec"),
        ("device.npu", "from dist_aclgraph.graph.plan import GraphPlan"),
        ("graph.capture", "from dist_aclgraph.scheduler.scheduler import Scheduler"),
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
