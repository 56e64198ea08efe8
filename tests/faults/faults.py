"""What befalls a command, and what is asked of it afterwards: an old file or a new one, a sentence, nothing left over."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.commands import Command, Snapshot, Zygote, snapshot, state, strays

KILLED, SENTENCE, DONE = "killed", "sentence", "done"
BLAS = "ended by OpenBLAS"  # which ends the process itself where it finds no memory for its buffers
PAGE = 4096
REMOVING = ("unlink", "unlinkat", "rmdir")  # where nothing is lost if it fails: the next writer sweeps
NOBODY = 65534
FUTURE = 4_000_000_000  # in the year 2096
DISK = 8 << 20  # bytes of the disk that becomes full
MEMORY = (1, 8, 32, 64, 128, 256, 512, 1024)  # megabytes beyond what is loaded


@dataclass
class Expected:
    """What a command finds, and what it leaves where nothing befalls it."""

    before: Snapshot
    afters: list[Snapshot]  #: by variant
    calls: list[str]
    seconds: float


@dataclass
class Bench:
    """Commands with all that they need, and a count of what was done to them."""

    zygote: Zygote
    materials: Path
    scratch: Path
    counted: Counter[tuple[str, str, str, str]] = field(
        default_factory=Counter
    )  #: command, fault, end, state
    _expected: dict[str, Expected] = field(default_factory=dict)

    def expected(self, command: Command) -> Expected:
        if command.name not in self._expected:
            found, seconds, calls = [], 0.0, []
            for variant in (0, 1):
                with self.folder(command) as folder:
                    before = snapshot(folder)
                    (end,) = self.zygote.runs(command.run(self.materials, folder, variant))
                    assert end["code"] == 0, end["said"]
                    assert strays(folder) == []
                    found.append(snapshot(folder))
                if variant == 0:
                    calls, seconds = end["calls"], end["seconds"]
            assert found[0] != before
            self._expected[command.name] = Expected(before, found, calls, seconds)
        return self._expected[command.name]

    @contextmanager
    def folder(self, command: Command, parent: Path | None = None) -> Iterator[Path]:
        """A folder with what stands there before."""
        folder = Path(tempfile.mkdtemp(dir=parent or self.scratch))
        folder.chmod(0o755)
        command.old(self.materials, folder)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def strike(
        self, command: Command, fault: str, *, again: bool = True, parent: Path | None = None, **how: Any
    ) -> tuple[str, str]:
        """A command and what befalls it; how it ended, and whether what is there is old or new."""
        with self.folder(command, parent) as folder:
            return self.strike_there(command, fault, folder, again=again, **how)

    def strike_there(
        self, command: Command, fault: str, folder: Path, *, again: bool = True, **how: Any
    ) -> tuple[str, str]:
        expected = self.expected(command)
        (end,) = self.zygote.runs(command.run(self.materials, folder, **how))
        ended = how_it_ended(end)
        found = state(command, snapshot(folder), expected.before, expected.afters[0])
        if ended == DONE:
            assert found == "new"
        if ended not in (KILLED, BLAS):
            assert strays(folder) == [], f"left over after {ended}: {strays(folder)}"
        self.counted[command.name, fault, ended, found] += 1
        self.after(command, folder, found, again)
        return ended, found

    def after(self, command: Command, folder: Path, found: str, again: bool) -> None:
        """The next run: the same command as ever, or any writer."""
        expected = self.expected(command)
        again = again and not (command.whole and found == "new")  # which is refused: the folder is there
        run = command.run(self.materials, folder) if again else {"folder": str(folder), "sweep": True}
        (end,) = self.zygote.runs(run)
        assert end["code"] == 0, end["said"]
        assert strays(folder) == [], f"left over after the next run: {strays(folder)}"
        if again:
            assert snapshot(folder) == expected.afters[0], "the next run has not made the same again"


def how_it_ended(end: dict[str, Any]) -> str:
    if end["code"] == -9:
        return KILLED
    if end["code"] in (1, -signal.SIGALRM) and "OpenBLAS error: Memory allocation" in end["said"]:
        return BLAS
    assert end["code"] in (0, 2) and "Traceback" not in end["said"], f"exit {end['code']}: {end['said']}"
    if end["code"] == 0:
        return DONE
    errors = [line for line in end["said"].splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and len(errors[0]) > 20, end["said"]
    return SENTENCE


# ── faults ────────────────────────────────────────────────────────────────────────────────────


def kills(bench: Bench, command: Command, every: int = 1, again: bool = True) -> int:
    """SIGKILL at each call that changes a file, of a write after half of its bytes."""
    for at in range(1, len(bench.expected(command).calls) + 1, every):
        ended, _ = bench.strike(command, "killed at a call", at=at, again=again)
        assert ended == KILLED
    return len(range(1, len(bench.expected(command).calls) + 1, every))


def random_kills(bench: Bench, command: Command, count: int, seed: int = 0) -> int:
    """SIGKILL by another process at a random moment from the first temporary file on; how many were in time."""
    moments, killed = random.Random(seed), 0
    for _ in range(count):
        ended, _ = bench.strike(
            command, "killed by another", again=False, kill_after=moments.uniform(0, 0.03)
        )
        killed += ended == KILLED
    return killed


def failing_calls(bench: Bench, command: Command, error: int, every: int = 1) -> None:
    """Each call fails once."""
    for at, name in enumerate(bench.expected(command).calls, 1):
        if name not in REMOVING and at % every == 0:
            bench.strike(command, f"{errno.errorcode[error]} at a call", at=at, errno=error, again=False)


def full_disk(bench: Bench, command: Command, disk: Path, points: int) -> None:
    """A disk on which so much is free: from nothing to what would do."""
    new = bench.expected(command).afters[0].values()
    needed = sum(PAGE * (len(held) // PAGE + 3) for held in new)
    ends = set()
    for free in range(0, needed + 1, max(PAGE, needed // max(1, points - 1) // PAGE * PAGE)):
        with bench.folder(command, disk) as folder:
            filler = disk / "filler"
            status = os.statvfs(disk)
            filler.write_bytes(b"x" * max(0, status.f_bavail * status.f_frsize - free))
            try:
                (end,) = bench.zygote.runs(command.run(bench.materials, folder))
                ended = how_it_ended(end)
                ends.add(ended)
                assert ended == DONE or "No space left on device" in end["said"], end["said"]
                found = state(command, snapshot(folder), *_expected(bench, command))
                assert strays(folder) == []
            finally:
                filler.unlink()
            bench.counted[command.name, "full disk", ended, found] += 1
            bench.after(command, folder, found, again=False)
    assert ends == {DONE, SENTENCE}


def limited_files(bench: Bench, command: Command, points: int) -> None:
    """No file may be larger than so much: a full disk where none can be mounted."""
    largest = max(map(len, bench.expected(command).afters[0].values()))
    for size in range(0, largest, max(1, largest // points)):
        ended, _ = bench.strike(command, "limit on files", file_size=size, again=False)
        assert ended == SENTENCE


def full_temporary_folder(bench: Bench, command: Command, disk: Path) -> None:
    """What a command writes for itself finds no room."""
    filler = disk / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        for _ in itertools.count():
            file.write(b"x" * PAGE)
    try:
        bench.strike(command, "full temporary folder", temporary=str(disk), again=False)
    finally:
        filler.unlink()


def no_permission(bench: Bench, command: Command) -> None:
    """As somebody else than the owner of the folder, and in a folder of everybody where files of others stay."""
    for fault, mode in (("read-only folder", 0o555), ("folder of others' files", 0o1777)):
        with bench.folder(command) as folder:
            folder.chmod(mode)
            for path in folder.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            (end,) = bench.zygote.runs(command.run(bench.materials, folder, user=NOBODY))
            ended = how_it_ended(end)
            found = state(command, snapshot(folder), *_expected(bench, command))
            assert strays(folder) == []
            assert ended == SENTENCE or mode != 0o555
            bench.counted[command.name, fault, ended, found] += 1


def little_memory(bench: Bench, command: Command, megabytes: Sequence[int]) -> None:
    for size in megabytes:
        bench.strike(command, "little memory", memory=size << 20, again=False)


def two_at_once(bench: Bench, command: Command, times: int) -> None:
    """Two that write different things to the same place: one of the two is there, and works."""
    expected = bench.expected(command)
    for _ in range(times):
        with bench.folder(command) as folder:
            ends = bench.zygote.runs(*(command.run(bench.materials, folder, variant) for variant in (0, 1)))
            told = [how_it_ended(end) for end in ends]
            found = state(command, snapshot(folder), expected.before, *expected.afters)
            assert found == "new" and DONE in told
            assert told == [DONE, DONE] or command.whole
            assert strays(folder) == []
            bench.counted[command.name, "two at once", " and ".join(sorted(told)), found] += 1
            bench.after(command, folder, found, again=False)


def clock_going_back(bench: Bench, command: Command) -> None:
    """At each look it is an hour earlier, and all that is there is of the far future."""
    with bench.folder(command) as folder:
        left = folder / ".gapa-onnx.0123456789abcdef.part"  # of a process that was killed, then
        left.write_bytes(b"half")
        for path in folder.rglob("*"):
            os.utime(path, (FUTURE, FUTURE))
        ended, _ = bench.strike_there(command, "clock going back", folder, clock=3600, again=False)
        assert ended == DONE and not left.exists()


# ── all of them ───────────────────────────────────────────────────────────────────────────────


def campaign(bench: Bench, command: Command, disk: Path | None, long: bool) -> None:
    """All faults, over one command: at every point, or at a few."""
    calls = len(bench.expected(command).calls)
    some = 1 if long else max(1, calls // 2) if command.slow else max(1, calls // 12)
    kills(bench, command, some, again=long)
    random_kills(bench, command, 12 if long else 2 if not command.slow else 1)
    if disk is not None:
        full_disk(bench, command, disk, 8 if long else 2)
        full_temporary_folder(bench, command, disk)
    little_memory(bench, command, MEMORY if long else MEMORY[2:3])
    no_permission(bench, command)
    if long or not command.slow:
        failing_calls(bench, command, errno.EIO, some)
        limited_files(bench, command, 4 if long else 1)
        two_at_once(bench, command, 6 if long else 1)
        clock_going_back(bench, command)


def _expected(bench: Bench, command: Command) -> tuple[Snapshot, Snapshot]:
    return bench.expected(command).before, bench.expected(command).afters[0]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A disk of a few megabytes, in memory; None where none may be mounted."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        yield None
        return
    disk.chmod(0o777)
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)
