"""Whatever stops a command that writes, the old file is whole or the new one is, and the next one leaves nothing over.

Each test is all faults over one command: kills at calls of the C library and by another process, a disk that is full, calls
that fail, little memory, folders of others, two writers at once, a clock going back. `make nightly` has every point.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.commands import COMMANDS, Command, materials, state, zygote
from faults.faults import KILLED, SENTENCE, Bench, campaign, how_it_ended, small_disk

from gapa_onnx.cli import app

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler"
)
LONG = [
    pytest.param(command, True, id=f"{command.name}, all", marks=pytest.mark.nightly) for command in COMMANDS
]
SHORT = [
    pytest.param(command, False, id=command.name)
    for command in COMMANDS
    if command.name not in ("convert", "evaluate --figures")  # slow, and written as others are
]


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with zygote() as running:
        for name in ("materials", "work"):
            (running.scratch / name).mkdir()
        yield Bench(running, materials(running, running.scratch / "materials"), running.scratch / "work")


@pytest.fixture(scope="module")
def disk(bench: Bench) -> Iterator[Path | None]:
    with small_disk(bench.scratch) as mounted:
        yield mounted


@pytest.mark.parametrize(("command", "long"), SHORT + LONG)
def test_nothing_is_lost_and_nothing_is_left(
    bench: Bench, disk: Path | None, command: Command, long: bool
) -> None:
    campaign(bench, command, disk, long)
    ends = {end for name, _, end, _ in bench.counted if name == command.name}
    assert {KILLED, SENTENCE} <= ends


def test_every_option_that_writes_is_among_them() -> None:
    """A new writer has to come here."""
    told = {"out", "predictions", "report", "figures"}
    writing = set()
    for command in app.registered_commands:
        names = set(command.callback.__annotations__)
        where = {name for name in names & told if not (name == "out" and command.callback.__name__ in READ)}
        writing |= {(command.callback.__name__, name) for name in where}
    assert writing == {
        ("convert", "out"), ("threshold", "out"), ("run", "predictions"), ("evaluate", "report"),
        ("evaluate", "figures"), ("package", "out"), ("collect", "out"),
    }  # fmt: skip


READ = ("run", "evaluate", "verify", "bench", "inspect")  #: whose `out` is the converted file that they read


# ── the tests can fail ────────────────────────────────────────────────────────────────────────

ONE = next(command for command in COMMANDS if command.name == "threshold")
OUTSIDE = next(command for command in COMMANDS if command.name == "threshold, weights outside")
WHOLE = next(command for command in COMMANDS if command.whole)
BEFORE, AFTER = {"model.onnx": b"old"}, {"model.onnx": b"new"}


@pytest.mark.parametrize(
    "now",
    [{}, {"model.onnx": b"ol"}, {"model.onnx": b"new", "other": b""}],
    ids=["gone", "half", "left over"],
)
def test_what_is_lost_is_seen(now: dict[str, bytes]) -> None:
    with pytest.raises(AssertionError):
        state(ONE, now, BEFORE, AFTER)


def test_a_model_without_its_weights_is_seen() -> None:
    before = {"beyond.onnx": b"old", "beyond.onnx.1.data": b"1"}
    after = {"beyond.onnx": b"new", "beyond.onnx.2.data": b"2"}
    both = {**before, "beyond.onnx.2.data": b"2"}
    assert state(OUTSIDE, both, before, after) == "old"
    for now in ({**after, "beyond.onnx.2.data": b""}, {"beyond.onnx": b"old", "beyond.onnx.2.data": b"2"}):
        with pytest.raises(AssertionError):
            state(OUTSIDE, now, before, after)


def test_half_a_folder_is_seen() -> None:
    after = {"package/a": b"a", "package/b": b"b"}
    assert state(WHOLE, {}, {}, after) == "old" and state(WHOLE, after, {}, after) == "new"
    with pytest.raises(AssertionError):
        state(WHOLE, {"package/a": b"a"}, {}, after)


@pytest.mark.parametrize(
    "end",
    [
        {"code": 1, "said": ""},
        {"code": -6, "said": ""},
        {"code": 2, "said": "Traceback (most recent call last)"},
    ],
)
def test_an_end_without_a_sentence_is_seen(end: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        how_it_ended(end)
