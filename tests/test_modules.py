"""How the tests are laid out: what several of them share is in tests/support, and folders are those of the package."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from support.paths import ROOT, TESTS

MODULES = sorted(TESTS.rglob("test_*.py"))
#: Folders of tests that are no room of the package.
BESIDE = {
    "compatibility",
    "faults",
    "fuzz",
    "soak",
    "runtime",
    "benchmarks",
    "zoo",
    "cli",
    "support",
    "cases",
}


def imported(path: Path) -> set[str]:
    """Every part of a dotted name that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            found |= set((node.module or "").split(".")) | {alias.name for alias in node.names}
    return found


def test_no_module_imports_a_test_module():
    names = {path.stem for path in MODULES}
    for path in TESTS.rglob("*.py"):
        assert not imported(path) & names, f"{path.relative_to(TESTS)} imports a test module"


def test_names_are_unique():
    counts = Counter(path.name for path in MODULES)
    assert [name for name, count in counts.items() if count > 1] == []


def test_folders_are_rooms():
    rooms = {path.name for path in (ROOT / "gapa_onnx").iterdir() if (path / "__init__.py").exists()}
    folders = {path.parent.relative_to(TESTS).parts[0] for path in MODULES if path.parent != TESTS}
    assert folders <= rooms | BESIDE
    assert rooms - {"cli"} <= folders | BESIDE, "a room without tests"
