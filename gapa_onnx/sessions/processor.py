"""What this machine computes with."""

from __future__ import annotations

import platform
from pathlib import Path

_FEATURES = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve")


def processor() -> str:
    """The architecture, and the instruction sets that code chooses by, as far as the system tells."""
    return " ".join([platform.machine(), *features()])


def features() -> list[str]:
    fields = _fields()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return [feature for feature in _FEATURES if feature in flags]


def model_name() -> str:
    """What its maker calls it; empty where the system does not tell."""
    return _fields().get("model name", "")


def _fields() -> dict[str, str]:
    """The first of each entry about processors."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return fields
