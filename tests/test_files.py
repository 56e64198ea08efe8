"""Writing files: whatever stops a writer, the old file is whole or the new one is, and the next writer cleans up."""

from __future__ import annotations

import ast
import errno
import multiprocessing
import os
import signal
import stat
import sys
from pathlib import Path

import house
import pytest
from support.kills import in_a_child, killed_before

from gapa_onnx import files
from gapa_onnx.errors import UserError

OLD, NEW = b"old" * 1000, b"new" * 1000
#: What a writer calls of the system from its first byte on, in this order.
CALLS = ("open", "fsync", "chmod", "replace", "unlink")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks and signals of POSIX")


def named(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_killed_writer_loses_nothing_and_the_next_one_cleans_up(tmp_path, call, number):
    path = tmp_path / "answers.json"
    path.write_bytes(OLD)
    code = in_a_child(killed_before(call, number, lambda: files.write(path, NEW)))
    assert code in (0, -signal.SIGKILL)  # 0 where it does not call so often
    assert path.read_bytes() in (OLD, NEW)
    files.write(tmp_path / "other.json", NEW)
    assert named(tmp_path) == ["answers.json", "other.json"]


def test_every_kind_of_kill_was_reached(tmp_path):
    """The test above is no test where no child is ever killed."""
    (tmp_path / "old").write_bytes(OLD)
    for call in CALLS[:4]:
        assert in_a_child(killed_before(call, 1, lambda: files.write(tmp_path / "old", NEW))) < 0


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_what_the_system_refuses_is_a_sentence_and_the_old_file_stays(tmp_path, monkeypatch, call):
    path = tmp_path / "answers.json"
    path.write_bytes(OLD)

    def full(*arguments: object, **named: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, call, full)
    with pytest.raises(UserError, match=r"cannot write .*answers\.json: No space left on device"):
        files.write(path, NEW)
    monkeypatch.undo()
    assert path.read_bytes() == OLD
    assert named(tmp_path) == ["answers.json"]


def test_a_disk_that_is_full_leaves_the_old_file_alone(tmp_path):
    """A real limit, that of the size of a file, half way through the bytes."""
    path = tmp_path / "answers.json"
    path.write_bytes(OLD)

    def limited() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(NEW) // 2, len(NEW) // 2))
        try:
            files.write(path, NEW)
        except UserError as error:
            os._exit(2 if "File too large" in error.message else 1)

    assert in_a_child(limited) == 2
    assert path.read_bytes() == OLD
    assert named(tmp_path) == ["answers.json"]


def test_mode_and_link_stay(tmp_path):
    real, link = tmp_path / "real" / "model.onnx", tmp_path / "link.onnx"
    real.parent.mkdir()
    real.write_bytes(OLD)
    real.chmod(0o640)
    link.symlink_to(real)
    files.write(link, NEW)
    assert link.is_symlink() and real.read_bytes() == NEW
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert named(tmp_path) == ["link.onnx", "real"] and named(real.parent) == ["model.onnx"]


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "new", NEW)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root gives files away")
def test_the_owner_stays(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    os.chown(path, 12345, 23456)
    files.write(path, NEW)
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 23456)


def test_what_is_being_written_is_not_swept(tmp_path):
    with files.replacing(tmp_path / "slow") as temporary:
        temporary.write_bytes(b"half")
        files.write(tmp_path / "fast", NEW)
        assert temporary.exists()
        temporary.write_bytes(NEW)
    assert (tmp_path / "slow").read_bytes() == NEW
    assert named(tmp_path) == ["fast", "slow"]


def test_two_writers_at_a_time_leave_one_whole_file(tmp_path):
    path = tmp_path / "file"
    texts = [bytes([65 + i]) * 100_000 for i in range(4)]
    children = [
        multiprocessing.get_context("fork").Process(
            target=lambda text=text: [files.write(path, text) for _ in range(20)]
        )
        for text in texts
    ]
    for child in children:
        child.start()
    while any(child.is_alive() for child in children):
        assert not path.exists() or path.read_bytes() in texts
    assert [child.exitcode for child in children] == [0] * 4
    assert named(tmp_path) == ["file"]


def test_what_is_no_ordinary_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place, why in (("pipe", "no ordinary file"), ("", "it is a folder"), ("no/where", "does not exist")):
        with pytest.raises(UserError, match=why):
            files.writable(tmp_path / place)


# ------------------------------------------------------------------ everybody writes through here

#: Modules that make files of their own in a temporary folder, which no user sees.
FOR_THEMSELVES = {
    "gapa_onnx.emit.guarding",
    "gapa_onnx.measure.coverage",
    "gapa_onnx.measure.profiling",
    "gapa_onnx.model.opening",
    "gapa_onnx.model.weights",
    "gapa_onnx.fit.kept",
}
#: Those that write into a path that `files` gave them.
GIVEN_A_PLACE = {
    "gapa_onnx.model.writing",
    "gapa_onnx.cli.answer_files",
    "gapa_onnx.packaging.folder",
    "gapa_onnx.fit.parts",
}


def writes(module: house.Module) -> bool:
    """Whether a module writes, renames or copies files by a path."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        whose = ast.unparse(node.func).split(".")[0]
        if name in ("write_bytes", "write_text", "mkstemp", "savefig") and whose != "canvas":
            return True
        if whose in ("os", "shutil") and name in ("replace", "rename", "link", "copy", "copyfile", "move"):
            return True
        modes = [one.value for one in (*node.args, *(key.value for key in node.keywords))
                 if isinstance(one, ast.Constant) and isinstance(one.value, str)]  # fmt: skip
        if name == "open" and any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes):
            return True
    return False


def test_every_file_for_a_user_is_written_through_here():
    writing = {module.name for module in house.modules().values() if writes(module)}
    assert "gapa_onnx.files" in writing
    assert writing - {"gapa_onnx.files"} <= FOR_THEMSELVES | GIVEN_A_PLACE
