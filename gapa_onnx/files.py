"""Writing files: whole or not at all, and what was there before stays until then.

A file is made beside its place, under a name of its own, brought to the disk and put in place by one rename; the folder
is brought to the disk as well. It keeps the mode and the owner of the file that it replaces, and where that is a link,
the link stays and what it points at is replaced. A new folder with all that is in it is made in the same way. A killed
process can leave such a file or folder behind: whoever writes beside it next removes it. Every writer holds a lock on
its own, so that nobody removes what another is still writing.

All that this package writes for a user goes through here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from gapa_onnx.errors import UserError

if sys.platform != "win32":
    import fcntl

PREFIX, SUFFIX = ".gapa-onnx.", ".part"  #: of the name of a file that is being written
ELSEWHERE = "choose another place"


class Staged:
    """A file that is being written, or a folder, in the folder that it will be put into."""

    def __init__(self, parent: Path, *, folder: bool = False):
        self.path, self._held = _created(parent, folder)

    def put(self, path: Path) -> None:
        """Bring it to the disk and let it take its place: a file with the mode and owner of what it replaces, a folder
        where there is none or an empty one."""
        if self.path.is_dir():
            _sync_all(self.path)
        else:
            with open(self.path, "rb+") as file:
                os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                _take_over(self.path, os.stat(path))
        self._let_go_before_renaming(path)
        os.replace(self.path, path)
        sync_folder(path.parent)

    def close(self) -> None:
        """Remove what was not put anywhere."""
        self._let_go_before_renaming(self.path)
        _remove(self.path)
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _let_go_before_renaming(self, path: Path) -> None:
        if sys.platform != "win32":
            return
        if self._held is not None:  # an open file cannot be renamed there
            os.close(self._held)
            self._held = None
        if (
            path != self.path and path.is_dir()
        ):  # nor can a folder take the place of another, though that is empty
            path.rmdir()


@contextlib.contextmanager
def staging(parent: Path, *, folder: bool = False) -> Iterator[Staged]:
    """A file or a folder in this one, gone at the end unless it was put in its place; raises OSError."""
    sweep(parent)
    staged = Staged(parent, folder=folder)
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
    with told(path), staging(path.parent, folder=True) as staged:
        yield staged.path
        staged.put(path)


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
                _remove(path)
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


def _created(parent: Path, folder: bool) -> tuple[Path, int | None]:
    """A new file or folder that everybody may read whom the umask lets, and a handle with a lock on it."""
    while True:
        path = parent / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
        if folder:
            path.mkdir()
            if sys.platform == "win32":
                return path, None
        flags = os.O_RDONLY if folder else os.O_CREAT | os.O_EXCL | os.O_RDWR
        try:
            held = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        except FileNotFoundError:
            if folder:  # swept already
                continue
            raise
        if sys.platform == "win32":
            return path, held
        with contextlib.suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX)
        if path.exists():  # nobody has swept it before it was locked
            return path, held
        os.close(held)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_all(folder: Path) -> None:
    """Bring all that is in a folder to the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


def _take_over(path: Path, former: os.stat_result) -> None:
    """Give a file the owner, as far as we may, and the mode of another."""
    if sys.platform != "win32":
        now = os.stat(path)
        if (now.st_uid, now.st_gid) != (former.st_uid, former.st_gid):
            with contextlib.suppress(PermissionError):
                os.chown(path, former.st_uid, former.st_gid)
    os.chmod(path, stat.S_IMODE(former.st_mode))
