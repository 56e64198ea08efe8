"""Writing files: whole or not at all, and what was there before stays until then.

A file is made beside its place, under a name of its own, brought to the disk and put in place by one rename; the folder
is brought to the disk as well. It keeps the mode and the owner of the file that it replaces, and where that is a link,
the link stays and what it points at is replaced. A killed process can leave such a file behind: whoever writes into the
folder next removes it. Every writer holds a lock on its own, so that nobody removes what another is still writing.

All that this package writes for a user goes through here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gapa_onnx.errors import UserError

if sys.platform != "win32":
    import fcntl

PREFIX, SUFFIX = ".gapa-onnx.", ".part"  #: of the name of a file that is being written
ELSEWHERE = "choose another place"


class Staged:
    """A file that is being written, in the folder that it will be put into."""

    def __init__(self, folder: Path):
        self.path, self._held = _created(folder)

    def put(self, path: Path) -> None:
        """Bring the file to the disk and let it take its place; with the mode and owner of what it replaces."""
        with open(self.path, "rb+") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            _take_over(self.path, os.stat(path))
        self._let_go_before_renaming()
        os.replace(self.path, path)
        sync_folder(path.parent)

    def close(self) -> None:
        """Remove what was not put anywhere."""
        self._let_go_before_renaming()
        self.path.unlink(missing_ok=True)
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _let_go_before_renaming(self) -> None:
        if sys.platform == "win32" and self._held is not None:  # an open file cannot be renamed there
            os.close(self._held)
            self._held = None


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Staged]:
    """A file in this folder, gone at the end unless it was put in its place; raises OSError."""
    sweep(folder)
    staged = Staged(folder)
    try:
        yield staged
    finally:
        staged.close()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of `path` if all goes well, and is gone if not."""
    place = final(path)
    with told(path), staging(place.parent) as staged:
        yield staged.path
        staged.put(place)


def write(path: Path, content: bytes) -> None:
    """Write a file as a whole."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path`, which is not there or empty, if all goes well, and is gone if not."""
    path = path.absolute()
    with told(path), tempfile.TemporaryDirectory(prefix=f"{PREFIX}{path.name}.", dir=path.parent) as name:
        staged = Path(name, path.name)
        staged.mkdir()  # the temporary folder itself is its owner's alone
        yield staged
        if path.exists():  # and is empty: else this fails
            path.rmdir()
        os.replace(staged, path)
        sync_folder(path.parent)


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """What the system says against writing `path`, as a sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}", ELSEWHERE) from error


def final(path: Path) -> Path:
    """Where a file really is: behind all links."""
    return Path(os.path.realpath(path))


def writable(path: Path) -> Path:
    """The path, if a file can be written there; found out before any work is done."""
    folder = final(path).parent
    if not folder.is_dir():
        raise UserError(
            f"cannot write {path}: the folder {folder} does not exist", "create it, or choose another"
        )
    if path.is_dir():
        raise UserError(f"cannot write {path}: it is a folder", "give the name of a file")
    if path.exists() and not path.is_file():
        raise UserError(f"cannot write {path}: it is no ordinary file", "give the name of a file")
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {path}: no permission in {folder}", ELSEWHERE)
    return path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Alone in putting files into a folder, among all processes that ask; not where its file system has no locks."""
    if sys.platform == "win32":
        yield
        return
    held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def sweep(folder: Path) -> None:
    """Remove what killed processes have left in a folder; not what is being written."""
    if sys.platform == "win32":
        return
    for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError):  # somebody else's, or gone already
            held = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(held)


def sync_folder(folder: Path) -> None:
    """Bring the names of a folder to the disk, where the system can."""
    if sys.platform == "win32":
        return
    with contextlib.suppress(OSError):
        held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(held)
        finally:
            os.close(held)


def _created(folder: Path) -> tuple[Path, int | None]:
    """A new file that everybody may read whom the umask lets, and a handle with a lock on it."""
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
        held = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o666)
        if sys.platform == "win32":
            return path, held
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        if path.exists():  # nobody has swept it before it was locked
            return path, held
        os.close(held)


def _take_over(path: Path, former: os.stat_result) -> None:
    """Give a file the owner, as far as we may, and the mode of another."""
    if sys.platform != "win32":
        now = os.stat(path)
        if (now.st_uid, now.st_gid) != (former.st_uid, former.st_gid):
            with contextlib.suppress(PermissionError):
                os.chown(path, former.st_uid, former.st_gid)
    os.chmod(path, stat.S_IMODE(former.st_mode))
