"""The native library as it was built: an error that may still be in it is hard to use. The ELF file is read by hand."""

from __future__ import annotations

import platform
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gapa_onnx.sessions.runtime import library_path

LIBRARY = library_path()
pytestmark = pytest.mark.skipif(
    LIBRARY is None or not sys.platform.startswith("linux"), reason="there is no library in ELF"
)

LOAD, DYNAMIC, STACK, RELRO = 1, 2, 0x6474E551, 0x6474E552  # kinds of segments
TEXT_RELOCATIONS, BIND_NOW, FLAGS, FLAGS_1, RUN_PATH, OLD_RUN_PATH = 22, 24, 30, 0x6FFFFFFB, 29, 15
STRINGS, SYMBOLS = 5, 6
BEHIND = 4, 7, 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFE  # hashes, relocations and versions of symbols
EXECUTABLE, WRITABLE = 1, 2
LANDING = bytes.fromhex("f30f1efa")  # endbr64: where an indirect call may land


@dataclass(frozen=True)
class Segment:
    kind: int
    flags: int
    offset: int
    address: int
    size: int


class Elf:
    """The segments, dynamic entries and symbols of a shared library of 64 bits."""

    def __init__(self, path: Path):
        self.content = path.read_bytes()
        assert self.content[:6] == b"\x7fELF\x02\x01"  # 64 bits, little endian
        (start,) = struct.unpack_from("<Q", self.content, 32)
        size, count = struct.unpack_from("<HH", self.content, 54)
        self.segments = [self._segment(start + number * size) for number in range(count)]
        self.dynamic = dict(self._dynamic())

    def _segment(self, at: int) -> Segment:
        kind, flags, offset, address, _, size = struct.unpack_from("<IIQQQQ", self.content, at)
        return Segment(kind, flags, offset, address, size)

    def _dynamic(self) -> Iterator[tuple[int, int]]:
        (segment,) = [one for one in self.segments if one.kind == DYNAMIC]
        for at in range(segment.offset, segment.offset + segment.size, 16):
            yield struct.unpack_from("<qQ", self.content, at)

    def at(self, address: int) -> int:
        """The place in the file of an address."""
        for one in self.segments:
            if one.kind == LOAD and one.address <= address < one.address + one.size:
                return one.offset + address - one.address
        raise AssertionError(f"no segment holds {address:#x}")

    def symbols(self) -> Iterator[tuple[str, int, int]]:
        """Name, section (0 for those that are elsewhere) and address."""
        strings, at = self.at(self.dynamic[STRINGS]), self.at(self.dynamic[SYMBOLS])
        # No entry tells how many there are: they end where another table starts, which one depends on the linker.
        tables = [self.at(self.dynamic[entry]) for entry in (STRINGS, *BEHIND) if entry in self.dynamic]
        end_of_symbols = min(table for table in tables if table > at)
        while at < end_of_symbols:
            name, _, _, section, address, _ = struct.unpack_from("<IBBHQQ", self.content, at)
            end = self.content.index(b"\0", strings + name)
            yield self.content[strings + name : end].decode(), section, address
            at += 24


@pytest.fixture(scope="module")
def elf() -> Elf:
    assert LIBRARY is not None
    return Elf(LIBRARY)


def test_nothing_is_both_writable_and_executable(elf):
    assert not [one for one in elf.segments if one.flags & EXECUTABLE and one.flags & WRITABLE]
    (stack,) = [one for one in elf.segments if one.kind == STACK]
    assert not stack.flags & EXECUTABLE
    assert TEXT_RELOCATIONS not in elf.dynamic and not elf.dynamic.get(FLAGS, 0) & 4


def test_tables_of_addresses_are_filled_at_load_and_read_only_from_then_on(elf):
    assert [one for one in elf.segments if one.kind == RELRO]
    assert elf.dynamic.get(FLAGS, 0) & 8 or elf.dynamic.get(FLAGS_1, 0) & 1 or BIND_NOW in elf.dynamic


def test_libraries_are_looked_for_nowhere_special(elf):
    assert RUN_PATH not in elf.dynamic and OLD_RUN_PATH not in elf.dynamic


def test_stacks_and_buffers_are_guarded(elf):
    elsewhere = {name for name, section, _ in elf.symbols() if section == 0}
    assert "__stack_chk_fail" in elsewhere
    assert [name for name in elsewhere if name.endswith("_chk")]  # of _FORTIFY_SOURCE


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the instruction is x86's")
def test_indirect_calls_land_where_they_may(elf):
    own = {name: address for name, section, address in elf.symbols() if section}
    assert set(own) == {"RegisterCustomOps"}
    at = elf.at(own["RegisterCustomOps"])
    assert elf.content[at : at + 4] == LANDING


def test_no_path_of_the_machine_that_built_it_is_inside(elf):
    assert not re.findall(rb"/[\w/.+-]*runtime/src/[\w/.]*", elf.content)
    assert not re.findall(rb"/(?:home|root|tmp)/[\w/.+-]{4,}", elf.content)
