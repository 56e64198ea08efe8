"""What is installed says what is linked into it, and the tools of the gate are the ones that were pinned."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.environments import python_with
from support.paths import ROOT

from gapa_onnx.sessions.runtime import library_path

LIBRARY = library_path()
DISTRIBUTION = importlib.metadata.distribution("gapa-onnx")
TOOLS = ROOT / ".ci" / "tools.txt"
#: Which text tells of which licence.
TEXTS = {"MIT": ("faiss.txt", "zig.txt"), "MPL-2.0": ("eigen.txt",),
         "GPL-3.0-or-later WITH GCC-exception-3.1": ("gcc.txt",),
         "Apache-2.0 WITH LLVM-exception": ("llvm.txt",)}  # fmt: skip

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")


def installed(name: str) -> Path:
    """A file of the wheel's metadata."""
    (found,) = [
        Path(str(DISTRIBUTION.locate_file(file)))
        for file in DISTRIBUTION.files or ()
        if str(file).endswith(name)
    ]
    return found


@pytest.fixture(scope="module")
def bill() -> dict[str, Any]:
    found = installed("gapa-onnx-runtime.cdx.json")
    assert found.parent.name == "sboms" and found.parent.parent.name.endswith(".dist-info")
    return json.loads(found.read_text())


@pytest.fixture(scope="module")
def linked(bill: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {component["name"]: component for component in bill["components"]}


def test_the_bill_is_of_this_wheel(bill: dict[str, Any]) -> None:
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("gapa-onnx-runtime", DISTRIBUTION.version)
    (depends,) = bill["dependencies"]
    assert depends["ref"] == root["bom-ref"]
    assert depends["dependsOn"] == [component["bom-ref"] for component in bill["components"]]


def test_the_library_was_compiled_of_what_the_bill_says(linked: dict[str, dict[str, Any]]) -> None:
    """By what the compiler has left in the library, and by what the package manager has installed."""
    assert LIBRARY is not None
    content = LIBRARY.read_bytes()
    assert b"libstdc++.so" not in content and b"libfaiss" not in content  # linked, not loaded
    compilers = set(re.findall(rb"GCC: \([^)]*\) (\d+\.\d+\.\d+)", content))
    if {"libstdc++", "libgcc"} & set(linked):
        assert {linked[name]["version"].encode() for name in ("libstdc++", "libgcc")} <= compilers
        if shutil.which("dpkg-query"):
            for name, package in (("faiss", "libfaiss-dev"), ("eigen", "libeigen3-dev")):
                query = ["dpkg-query", "--show", "--showformat=${Version}", package]
                found = subprocess.run(query, capture_output=True, text=True).stdout
                assert found.startswith(f"{linked[name]['version']}-"), name
    else:
        assert {"libcxx", "libcxxabi", "libunwind", "zig-compiler-rt"} <= set(linked)
    assert {"faiss", "eigen"} <= set(linked)


def test_all_that_is_linked_has_its_licence_in_the_wheel(linked: dict[str, dict[str, Any]]) -> None:
    named = DISTRIBUTION.metadata.get_all("License-File") or []
    assert "LICENSE" in named and len(named) == len(set(named))
    assert {Path(name).name for name in named[1:]} == {
        path.name for path in (ROOT / "runtime" / "licences").iterdir()
    }
    for name, component in linked.items():
        (told,) = component["licenses"]
        licence = told.get("expression") or told["license"]["id"]
        texts = [installed(f"licences/{text}").read_text() for text in TEXTS[licence]]
        assert any(text.splitlines()[0].endswith(licence) and len(text) > 1000 for text in texts), name


@pytest.mark.nightly
def test_the_bill_follows_the_schema() -> None:
    python = python_with("cyclonedx", "cyclonedx-python-lib[json-validation]")
    program = (
        "import sys; from cyclonedx.schema import SchemaVersion; from cyclonedx.validation.json import JsonStrictValidator; "
        "print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()))"
    )
    done = subprocess.run(
        [python, "-c", program, installed("gapa-onnx-runtime.cdx.json")], capture_output=True, text=True
    )
    assert done.stdout.strip() == "None", done.stdout + done.stderr


# ── the tools ─────────────────────────────────────────────────────────────────────────────────


def pinned(text: str) -> dict[str, str]:
    """Version by name; an AssertionError where something is not pinned by a hash."""
    found = {}
    for entry in text.replace("\\\n", " ").splitlines():
        name, version, *rest = re.split(r"==|\s+", entry.strip())
        assert any(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", part) for part in rest), entry
        found[name] = version
    return found


def test_every_tool_is_pinned_by_its_hashes() -> None:
    text = TOOLS.read_text()
    found = pinned(text)
    wanted = [
        line
        for line in (TOOLS.with_suffix(".in")).read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert set(wanted) <= set(found) and len(wanted) >= 5
    assert "://" not in text and "index" not in text.replace("--hash", "")


def test_a_tool_without_a_hash_is_seen() -> None:
    with pytest.raises(AssertionError):
        pinned("ruff==0.17.5\n")


def test_the_gate_installs_them() -> None:
    make, gate = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    assert "--require-hashes -r .ci/tools.txt" in make
    assert "--no-isolation" in gate  # what builds the wheel is pinned as well


def test_the_tools_that_run_are_these() -> None:
    found = pinned(TOOLS.read_text())
    for name in ("ruff", "mypy", "clang-format", "build"):
        try:
            assert importlib.metadata.version(name) == found[name]
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed here")
