"""The rooms of the house, in their order, and what the source says about them.

A room is a folder or a module directly in gapa_onnx/, or cli/, which is installed as gapa_onnx.cli. A room imports
only rooms before it in `ROOMS`. The source is read, never imported. `python tools/house.py` prints what
breaks the limits; tests/test_house.py fails on it; tools/draw_house.py draws the house.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "gapa_onnx"
NATIVE = "gapa_onnx_runtime"  # of the same project: it tells where the native library lies

#: The names of the package itself: `gapa_onnx/__init__.py`.
FRONT_DOOR = "front door"

#: room -> what it is for; a room imports only rooms before it
ROOMS = {
    "errors": "what is the user's to fix",
    "files": "writing: whole or not at all",
    "arrays": "the name of a numpy array",
    "tensors": "what a serialized tensor must be",
    "progress": "how a long step says how far it is",
    "threads": "one thread, or side by side",
    "strict_json": "JSON to dataclasses, strictly",
    "declarations": "how a setting is declared",
    "settings": "every choice of a conversion",
    "record": "what a file says about itself",
    "presence": "what a record names is in its file",
    "data": "calibration data: files, rows, batches",
    "model": "the source model: load, shapes, layers, constants",
    "variance": "rules, and the walk that applies them",
    "op": "the ai.gapa operators and their indexes",
    "sessions": "running models on onnxruntime",
    "plan": "sites, tasks, and what stands beside an output",
    "fit": "inducing points and statistics of every site",
    "emit": "the variance graph, written beside the source",
    "settle": "left-out rows: weights, noise, thresholds",
    "measure": "verify, evaluate, bench",
    "monitor": "metrics, and whether inputs have changed",
    "packaging": "folders that servers and runtimes take",
    "compiler": "the steps of a conversion, in order",
    "ray": "the same with shards read by a cluster",
    FRONT_DOOR: "the names that users import",
    "cli": "the commands; alone in printing",
}

MOST_LINES_OF_A_MODULE = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_COMPLEXITY = 15

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


@dataclass(frozen=True)
class Function:
    name: str  # gapa_onnx.room.module.Class.method
    lines: int
    complexity: int


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def functions(self) -> Iterator[Function]:
        """All functions and methods, also those inside another."""
        return _functions(self.tree, self.name)


@dataclass(frozen=True)
class Import:
    by: str
    of: str
    line: int
    only_for_types: bool = False

    def __str__(self) -> str:
        return f"{self.by}, line {self.line}: imports {self.of}"


def modules(root: Path = ROOT) -> dict[str, Module]:
    """The product's modules by name, as they are installed."""
    found = {}
    for folder, prefix in ((root / PACKAGE, PACKAGE), (root / "cli", f"{PACKAGE}.cli")):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if prefix == PACKAGE and parts[0] == "cli":  # a link to cli/ that a checkout may have
                continue
            name = ".".join([prefix, *parts]).removesuffix(".__init__")
            found[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else FRONT_DOOR


def imports(house: dict[str, Module]) -> list[Import]:
    """Every import of one product module by another, wherever in the file it stands."""
    return [entry for module in house.values() for entry in _imports(module, house)]


def third_party(module: Module) -> set[str]:
    """The first parts of the names of all else that a module imports."""
    found = set()
    for node, _ in _import_statements(module.tree, False):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        found |= {name.split(".")[0] for name in names}
    return found - {PACKAGE, NATIVE}


def wrong_ways(found: Iterable[Import], order: Iterable[str] = tuple(ROOMS)) -> list[Import]:
    """Imports of a room that is not before the one that imports it, or that is not in the order at all."""
    place = {name: at for at, name in enumerate(order)}
    return [entry for entry in found if place.get(room(entry.of), len(place)) > place.get(room(entry.by), -1)]


def cycles(found: Iterable[Import]) -> list[list[str]]:
    """Groups of modules that import each other at run time, at the top of a file or in a function."""
    reads: dict[str, set[str]] = {}
    for entry in found:
        if not entry.only_for_types:
            reads.setdefault(entry.by, set()).add(entry.of)
    reached = {module: _reached(module, reads) for module in reads}
    groups = {
        tuple(sorted({module} | {other for other in reached[module] if module in reached.get(other, ())}))
        for module in reads
        if module in reached[module]
    }
    return sorted(list(group) for group in groups)


def edges(found: Iterable[Import]) -> set[tuple[str, str]]:
    """(importing room, imported room), at run time or for types."""
    pairs = {(room(entry.by), room(entry.of)) for entry in found}
    return {(by, of) for by, of in pairs if by != of}


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity: 1, and 1 for each branch: also in comprehensions, `and`, `or` and conditional
    expressions, which ruff's C901 leaves out. What is defined inside the function counts."""
    return 1 + sum(_branches(node) for node in ast.walk(function))


def _branches(node: ast.AST) -> int:
    match node:
        case ast.For() | ast.AsyncFor() | ast.While():
            return 1 + bool(node.orelse)
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.If() | ast.IfExp() | ast.ExceptHandler() | ast.Assert() | ast.match_case():
            return 1
    return 0


def _functions(node: ast.AST, prefix: str) -> Iterator[Function]:
    for child in _statements(node):
        name = prefix
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            name = f"{prefix}.{child.name}"
        if isinstance(child, _FUNCTIONS):
            lines = (child.end_lineno or child.lineno) - child.lineno + 1
            yield Function(name, lines, complexity(child))
        yield from _functions(child, name)


def _imports(module: Module, house: dict[str, Module]) -> Iterator[Import]:
    for node, only_for_types in _import_statements(module.tree, False):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif node.level:
            raise ValueError(f"{module.name}, line {node.lineno}: a relative import; write the whole name")
        else:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            # `__version__` and `__path__` are there before any module of the package is loaded
            if name.split(".")[0] == PACKAGE and not name.startswith(f"{PACKAGE}.__"):
                of = name if name in house else name.rpartition(".")[0]
                yield Import(module.name, of, node.lineno, only_for_types)


def _import_statements(
    node: ast.AST, only_for_types: bool
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in _statements(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, only_for_types
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.body:
                yield from _import_statements(ast.Module([statement], []), True)
            for statement in child.orelse:
                yield from _import_statements(ast.Module([statement], []), only_for_types)
        else:
            yield from _import_statements(child, only_for_types)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What stands right inside a statement; expressions hold neither imports nor functions."""
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS))


def _reached(start: str, reads: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        for module in reads.get(ahead.pop(), ()):
            if module not in seen:
                seen.add(module)
                ahead.append(module)
    return seen


def report() -> Iterator[str]:
    """What is over a limit, the largest first, and what points the wrong way."""
    house = modules()
    functions = [function for module in house.values() for function in module.functions()]
    yield f"modules over {MOST_LINES_OF_A_MODULE} lines"
    for module in sorted(house.values(), key=lambda module: -module.lines):
        if module.lines > MOST_LINES_OF_A_MODULE:
            yield f"  {module.lines:4} {module.name}"
    yield f"functions over {MOST_LINES_OF_A_FUNCTION} lines"
    for function in sorted(functions, key=lambda function: -function.lines):
        if function.lines > MOST_LINES_OF_A_FUNCTION:
            yield f"  {function.lines:4} {function.name}"
    yield f"functions over a complexity of {MOST_COMPLEXITY}"
    for function in sorted(functions, key=lambda function: -function.complexity):
        if function.complexity > MOST_COMPLEXITY:
            yield f"  {function.complexity:4} {function.name}"
    yield "imports of a later room"
    yield from (f"  {entry}" for entry in wrong_ways(imports(house)))
    yield "modules that import each other"
    yield from (f"  {', '.join(group)}" for group in cycles(imports(house)))


if __name__ == "__main__":
    print("\n".join(report()))
