"""Build the wheels of a release, for every platform from one machine: `make wheels`, docs/releasing.md.

Three distributions come out of the one pyproject.toml, and no file is in two of them:

    gapa-onnx-runtime   the native library, one wheel for each platform; depends on nothing
    gapa-onnx-core      all Python code, and that library; leaves it to the user which onnxruntime is there
    gapa-onnx           no file: gapa-onnx-core and the onnxruntime that pyproject.toml names

The same commit gives the same bytes wherever it is built: files are those that git knows, dates are the commit's.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyproject_metadata
import wheel_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "release"
CORE, NATIVE = "gapa-onnx-core", "gapa-onnx-runtime"
BILL = "gapa-onnx-runtime.cdx.json"  # written by runtime/components.cmake
OURS_ALONE = {"license-files": ["LICENSE"]}  # of what has no library in it
FLAVOURS = ("onnxruntime", "onnxruntime-gpu")


@dataclass(frozen=True)
class Target:
    """A platform that the native library is built for."""

    zig: str  #: as the compiler calls it
    tag: str  #: as wheels do
    library: str
    marker: str  #: of the same platform, in a requirement
    run: bool  #: whether its library has been run: only then it is built by itself, and gapa-onnx-core asks for it


TARGETS = {
    "linux-x86_64": Target(
        "x86_64-linux-gnu.2.28",
        "manylinux_2_28_x86_64",
        "libgapa_onnx.so",
        "sys_platform == 'linux' and platform_machine == 'x86_64'",
        run=True,
    ),
    "linux-aarch64": Target(
        "aarch64-linux-gnu.2.28",
        "manylinux_2_28_aarch64",
        "libgapa_onnx.so",
        "sys_platform == 'linux' and platform_machine == 'aarch64'",
        run=True,
    ),
    "macos-arm64": Target(
        "aarch64-macos.13.0",
        "macosx_13_0_arm64",
        "libgapa_onnx.dylib",
        "sys_platform == 'darwin' and platform_machine == 'arm64'",
        run=False,
    ),
    "windows-x86_64": Target(
        "x86_64-windows-gnu",
        "win_amd64",
        "gapa_onnx.dll",
        "sys_platform == 'win32' and platform_machine == 'AMD64'",
        run=False,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder for the wheels")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="this platform; repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    chosen = parser.parse_args(arguments)
    date = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"))
    if git("status", "--porcelain"):
        print("note: the checkout has changes that no commit has", file=sys.stderr)
    chosen.to.mkdir(parents=True, exist_ok=True)

    wheels = [core(), front()]
    for name in chosen.target or [name for name, target in TARGETS.items() if target.run]:
        wheels.append(runtime(TARGETS[name], *build(name, TARGETS[name], chosen.jobs)))
    written = [wheel_file.write(wheel, chosen.to, date) for wheel in wheels]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(written)]
    (chosen.to / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")
    return 0


# --------------------------------------------------------------------- the native library


def build(name: str, target: Target, jobs: int) -> tuple[bytes, bytes]:
    """The native library for a platform, from the sources of FAISS and Eigen too; and the bill of what is linked."""
    import ziglang

    folder = BUILD / name
    programs = Path(sysconfig.get_path("scripts"))
    zig = Path(ziglang.__file__).parent / "zig"
    defined = {
        "CMAKE_MAKE_PROGRAM": programs / "ninja",
        "CMAKE_TOOLCHAIN_FILE": ROOT / "runtime" / "cmake" / "zig.cmake",
        "ZIG": zig,
        "ZIG_TARGET": target.zig,
        "GAPA_FROM_SOURCE": "ON",
        "FETCHCONTENT_BASE_DIR": BUILD / "sources",
    }
    options = [f"-D{key}={value}" for key, value in defined.items()]
    cmake = str(programs / "cmake")
    run(cmake, "-G", "Ninja", "-S", str(ROOT / "runtime"), "-B", str(folder), *options)
    run(cmake, "--build", str(folder), "--target", "gapa_onnx", "--parallel", str(jobs))
    return (folder / target.library).read_bytes(), (folder / BILL).read_bytes()


# --------------------------------------------------------------------- the distributions


def runtime(target: Target, library: bytes, bill: bytes) -> wheel_file.Wheel:
    """gapa-onnx-runtime for one platform."""
    folder = "gapa_onnx_runtime"
    return wheel(
        {
            "name": NATIVE,
            "description": "The native library of gapa-onnx, for where converted files are served.",
            "readme": {"text": _documentation(folder), "content-type": "text/plain"},
            "requires-python": ">=3.8",
        },
        f"py3-none-{target.tag}",
        {**tracked({folder: f"runtime/{folder}"}), f"{folder}/{target.library}": library},
        {BILL: bill},
    )


def core() -> wheel_file.Wheel:
    """gapa-onnx-core: all Python code."""
    whole = pyproject()
    packages = whole["tool"]["scikit-build"]["wheel"]["packages"]
    code = {place: folder for place, folder in packages.items() if not place.startswith("gapa_onnx_runtime")}
    version, others = whole["project"]["version"], requirements(flavours=False)
    native = [f"{NATIVE}=={version}; {target.marker}" for target in TARGETS.values() if target.run]
    about = {**whole["project"], **OURS_ALONE, "name": CORE, "dependencies": others + native}
    return wheel(about, "py3-none-any", tracked(code))


def front() -> wheel_file.Wheel:
    """gapa-onnx: no file, gapa-onnx-core with an onnxruntime."""
    project = pyproject()["project"]
    version = project["version"]
    about = {
        **{key: value for key, value in project.items() if key != "scripts"},
        **OURS_ALONE,
        "dependencies": [f"{CORE}=={version}", *requirements(flavours=True)],
        "optional-dependencies": {
            extra: [f"{CORE}[{extra}]=={version}"] for extra in project["optional-dependencies"]
        },
    }
    return wheel(about, "py3-none-any", {})


def wheel(
    about: dict[str, Any], tag: str, files: dict[str, bytes], boms: Mapping[str, bytes] = MappingProxyType({})
) -> wheel_file.Wheel:
    """A wheel of files, described by a [project] table; what the table leaves out is as in pyproject.toml."""
    project = pyproject()["project"]
    table = {key: project[key] for key in ("version", "license", "license-files")}
    table.update(about)
    described = pyproject_metadata.StandardMetadata.from_pyproject({"project": table}, project_dir=ROOT)
    return wheel_file.Wheel(
        name=table["name"],
        version=table["version"],
        tag=tag,
        metadata=str(described.as_rfc822()),
        files=files,
        scripts=table.get("scripts", {}),
        licenses={name: (ROOT / name).read_bytes() for name in table["license-files"]},
        boms=boms,
    )


def requirements(*, flavours: bool) -> list[str]:
    """The dependencies in pyproject.toml that are an onnxruntime, or those that are not."""
    found = []
    for text in pyproject()["project"]["dependencies"]:
        name = text.split(">")[0].split("=")[0].split(";")[0].strip()
        if (name in FLAVOURS) == flavours:
            found.append(text)
    return found


def tracked(packages: dict[str, str]) -> dict[str, bytes]:
    """The files of folders that git knows, by where they are installed."""
    found = {}
    for place, folder in packages.items():
        for name in git("ls-files", "-z", "--", folder).split("\0"):
            if name:
                found[f"{place}/{Path(name).relative_to(folder).as_posix()}"] = (ROOT / name).read_bytes()
    return found


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _documentation(package: str) -> str:
    """What a package says of itself in its first lines."""
    text = (ROOT / "runtime" / package / "__init__.py").read_text()
    return text.split('"""')[1].strip() + "\n"


# --------------------------------------------------------------------- programs


def run(*command: str) -> None:
    """Run a program; its output goes where ours does."""
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
