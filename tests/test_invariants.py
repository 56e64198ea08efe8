"""Invariants of ARCHITECTURE.md that only the source can show: who prints, who reads files, who knows which names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import house

NATIVE = house.ROOT / "runtime"

#: Written for developers, by `python -m`: the page of operators goes to stdout.
PRINTS = {"gapa_onnx.variance.rules.page"}


def in_room(room: str) -> Iterator[house.Module]:
    prefix = f"{house.PACKAGE}.{room}"
    return (m for m in house.modules().values() if m.name == prefix or m.name.startswith(f"{prefix}."))


def called(module: house.Module) -> set[str]:
    """Names of the functions and methods that a module calls."""
    calls = (node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call))
    return {
        f.id if isinstance(f, ast.Name) else f.attr for f in calls if isinstance(f, (ast.Name, ast.Attribute))
    }


def imported(module: house.Module) -> set[str]:
    """The packages that a module imports, by their first name."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def texts(module: house.Module) -> set[str]:
    return {
        n.value for n in ast.walk(module.tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }


def test_only_the_command_line_prints():
    commands = {module.name for module in in_room("cli")}
    assert {m.name for m in house.modules().values() if "print" in called(m)} - commands <= PRINTS


def test_rules_see_neither_onnxruntime_nor_files():
    rules = list(in_room("variance"))
    assert rules
    assert not [m.name for m in rules if imported(m) & {"onnxruntime", "faiss", "pathlib", "os", "tempfile"}]
    assert not [m.name for m in rules if called(m) & {"open", "read_text", "write_text"}]


def test_only_splice_puts_nodes_into_a_model():
    puts = re.compile(r"\bgraph\.node\.(extend|append|insert|add)\(")
    assert [m.name for m in house.modules().values() if puts.search(m.text)] == ["gapa_onnx.model.splice"]


def test_only_the_contract_knows_the_operators():
    name = re.compile(r"ai\.gapa|Gapa(Activation|Classes)\w*")
    knowing = {m.name for m in house.modules().values() if any(name.fullmatch(text) for text in texts(m))}
    assert knowing == {"gapa_onnx.op.contract"}


def test_faiss_stays_in_one_file_and_reads_no_file():
    sources = {p: p.read_text() for p in NATIVE.rglob("*") if p.suffix in {".cc", ".h", ".inc"}}
    code = {path: re.sub(r"//.*", "", text) for path, text in sources.items()}
    assert [p.name for p, text in code.items() if "faiss::" in text or "#include <faiss" in text] == [
        "index.cc"
    ]
    assert not [p.name for p, text in code.items() if "read_index" in text]
