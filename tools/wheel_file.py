"""A wheel, written so that the same content gives the same bytes: sorted, with one date and one mode for all."""

from __future__ import annotations

import base64
import hashlib
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

EARLIEST = 315532800  # 1980, before which a zip file has no dates
MODE = 0o100644


@dataclass(frozen=True)
class Wheel:
    """What one wheel holds; `METADATA`, `WHEEL` and `RECORD` are made of it."""

    name: str
    version: str
    tag: str  #: such as py3-none-any
    metadata: str
    files: Mapping[str, bytes]  #: by the place where they are installed
    scripts: Mapping[str, str]  #: commands
    licenses: Mapping[str, bytes]
    boms: Mapping[str, bytes]  #: what is linked into its libraries

    @property
    def stem(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}"

    @property
    def file_name(self) -> str:
        return f"{self.stem}-{self.tag}.whl"


def write(wheel: Wheel, folder: Path, date: int) -> Path:
    """Write a wheel into a folder; `date` in seconds, as of SOURCE_DATE_EPOCH."""
    content = dict(sorted({**wheel.files, **_described(wheel)}.items()))
    place = f"{wheel.stem}.dist-info/RECORD"
    content[place] = _record(content, place)
    path = folder / wheel.file_name
    stamp = time.gmtime(max(date, EARLIEST))[:6]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, stamp)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # Unix, wherever it is written
            entry.external_attr = MODE << 16
            archive.writestr(entry, data)
    return path


def _described(wheel: Wheel) -> dict[str, bytes]:
    """What a wheel says about itself."""
    info = f"{wheel.stem}.dist-info"
    pure = "true" if wheel.tag.endswith("-any") else "false"
    about = ["Wheel-Version: 1.0", "Generator: gapa-onnx", f"Root-Is-Purelib: {pure}", f"Tag: {wheel.tag}"]
    found = {
        f"{info}/METADATA": wheel.metadata.encode(),
        f"{info}/WHEEL": ("\n".join(about) + "\n").encode(),
    }
    if wheel.scripts:
        lines = [f"{name} = {where}" for name, where in sorted(wheel.scripts.items())]
        found[f"{info}/entry_points.txt"] = ("\n".join(["[console_scripts]", *lines]) + "\n").encode()
    for name, text in wheel.licenses.items():
        found[f"{info}/licenses/{name}"] = text
    for name, text in wheel.boms.items():
        found[f"{info}/sboms/{name}"] = text
    return found


def _record(content: Mapping[str, bytes], itself: str) -> bytes:
    """The list of all files with their hashes; of the list itself there is none."""
    lines = []
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{itself},,\n"]).encode()
