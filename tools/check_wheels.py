"""Check the wheels of a release as files: `make check-wheels`. What is wrong is printed, and the exit code is 1.

Of the native library for Linux: auditwheel's verdict, the newest symbol of glibc, what else it needs, what it shows.
Of every platform's: the size of the wheel. Whether two builds are equal is told by `tools/reproducible.py`.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

ROOT = Path(__file__).resolve().parents[1]
NEWEST_GLIBC = (2, 28)
LARGEST = 3_000_000  # bytes of a wheel of the native library
SHOWN = {"RegisterCustomOps"}
#: parts of glibc itself, and the loader that it comes with
GLIBC = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist")
    folder = parser.parse_args(arguments).folder
    wheels = sorted(folder.glob("*.whl"))
    wrong = [] if wheels else [f"there are no wheels in {folder}"]
    for path in wheels:
        size = path.stat().st_size
        print(f"{path.name}: {size:,} bytes")
        if path.name.startswith("gapa_onnx_runtime-"):
            if size > LARGEST:
                wrong.append(f"{path.name}: {size:,} bytes are more than {LARGEST:,}")
            if "manylinux" in path.name:
                wrong += [f"{path.name}: {text}" for text in linux(path)]
    for text in wrong:
        print(f"wrong: {text}", file=sys.stderr)
    return 1 if wrong else 0


def linux(path: Path) -> Iterator[str]:
    """What is wrong with a wheel for Linux; what is right is printed."""
    verdict = audited(path)
    print(f"  auditwheel: {verdict}")
    found = re.match(r"manylinux_(\d+)_(\d+)_", verdict)
    if found is None or (int(found[1]), int(found[2])) > NEWEST_GLIBC:
        yield f"auditwheel says {verdict}"
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        library = ELFFile(io.BytesIO(archive.read(name)))
    newest = max(versions(library))
    print(f"  newest symbol: GLIBC_{'.'.join(map(str, newest))}")
    if newest > NEWEST_GLIBC:
        yield f"it needs a glibc of {newest}"
    others = [one for one in needed(library) if not GLIBC.fullmatch(one)]
    if others:
        yield f"it needs {', '.join(others)}"
    shown = set(exported(library))
    if shown != SHOWN:
        yield f"it shows {sorted(shown)}"


def audited(path: Path) -> str:
    """The platform that auditwheel takes a wheel for."""
    program = Path(sysconfig.get_path("scripts")) / "auditwheel"
    done = subprocess.run([program, "show", path], capture_output=True, text=True)
    said = " ".join((done.stdout + done.stderr).split())
    found = re.search(r'consistent with the following platform tag: "([^"]+)"', said)
    return found[1] if found else said


def versions(library: ELFFile) -> Iterator[tuple[int, ...]]:
    """The versions of glibc whose symbols a library needs."""
    for section in library.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for _, entries in section.iter_versions():
                for entry in entries:
                    if entry.name.startswith("GLIBC_"):
                        yield tuple(map(int, entry.name.removeprefix("GLIBC_").split(".")))


def needed(library: ELFFile) -> Iterator[str]:
    """The libraries that a library loads."""
    for section in library.iter_sections():
        if isinstance(section, DynamicSection):
            yield from (tag.needed for tag in section.iter_tags() if tag.entry.d_tag == "DT_NEEDED")


def exported(library: ELFFile) -> Iterator[str]:
    """The names of a library that others can use."""
    section = library.get_section_by_name(".dynsym")
    assert isinstance(section, SymbolTableSection)
    for symbol in section.iter_symbols():
        if symbol.name and symbol.entry.st_shndx != "SHN_UNDEF":
            yield symbol.name


if __name__ == "__main__":
    sys.exit(main())
