"""A process that has loaded everything and run nothing; it forks a child for each command line, which a fault may befall.

A request is a line of JSON on its input: a list of runs that are started together, as `Run` of faults.py describes them.
The answer is a line with a list of their ends. Commands that are run by a fork of a process that has run a model hang
on the threads that are not there; hence this one, and it makes a run cheap enough for hundreds of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

TRACEBACK = 70  # the exit code of a child that ends in one
MOST_SAID = 1 << 20  # bytes that a child may say before anybody reads them
SPLIT_SECOND = 1e-4
Run = dict[str, Any]


def main() -> None:
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    shim.gapa_fault.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    shim.gapa_calls.restype = ctypes.c_char_p
    shim.gapa_clock.argtypes = [ctypes.c_long]
    _load_everything()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        started = [_started(run, shim) for run in json.loads(line)]
        answers.write(json.dumps([_ended(*one) for one in started]) + "\n")
        answers.flush()


def _load_everything() -> None:
    import gapa_onnx

    for module in pkgutil.walk_packages(gapa_onnx.__path__, "gapa_onnx."):
        if not {"__main__", "clients", "libgapa_onnx"} & set(module.name.split(".")):
            importlib.import_module(module.name)
    for name in (
        "matplotlib.pyplot",
        "matplotlib.backends.backend_svg",
        "PIL.Image",
        "sklearn.metrics",
        "tokenizers",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _started(run: Run, shim: ctypes.CDLL) -> tuple[Run, int, int, float]:
    temporary = tempfile.mkdtemp(dir=run["scratch"])
    os.chmod(temporary, 0o777)
    told, telling = os.pipe()
    fcntl.fcntl(telling, fcntl.F_SETPIPE_SZ, MOST_SAID)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = TRACEBACK
        try:
            for stream in (1, 2):
                os.dup2(telling, stream)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            code = _run({"temporary": temporary, **run}, shim)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(telling, b"\0" + shim.gapa_calls())
            os._exit(code)
    os.close(telling)
    return run, child, told, began


LONGEST = 60  # seconds that a command with little memory may take


def _run(run: Run, shim: ctypes.CDLL) -> int:
    """The command, in the child."""
    from gapa_onnx import files
    from gapa_onnx.cli import main as command
    from gapa_onnx.model import protos

    os.chdir("/")
    os.environ["TMPDIR"] = tempfile.tempdir = run["temporary"]
    if "largest_proto" in run:
        protos.LARGEST_PROTO = run["largest_proto"]
    if "file_size" in run:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (run["file_size"],) * 2)
    if "memory" in run:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + run["memory"],) * 2)
        signal.alarm(LONGEST)  # where OpenBLAS ends the process, onnxruntime's threads may never be joined
    if "user" in run:
        os.setgroups([])
        os.setgid(run["user"])
        os.setuid(run["user"])
    shim.gapa_fault(run["folder"].encode(), run.get("at", 0), run.get("errno", 0), run.get("forever", False))
    shim.gapa_clock(run.get("clock", 0))
    if "sweep" in run:
        for folder in (
            Path(run["folder"]),
            *(path for path in Path(run["folder"]).rglob("[!.]*") if path.is_dir()),
        ):
            files.write(folder / "swept", b"")
        return 0
    return command(run["arguments"])


def _ended(run: Run, child: int, told: int, began: float) -> dict[str, Any]:
    if "kill_after" in run:
        _kill_while_it_writes(child, Path(run["folder"]), run["kill_after"])
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - began
    with open(told, "rb") as pipe:
        said, _, calls = pipe.read().decode(errors="replace").partition("\0")
    code = os.waitstatus_to_exitcode(status)
    return {"code": code, "said": said, "calls": calls.split(), "seconds": seconds}


def _kill_while_it_writes(child: int, folder: Path, after: float) -> None:
    """Kill a child so many seconds after a temporary file has shown up in the folder, if it lives so long."""
    while not any(name.startswith(".gapa-onnx.") for name in os.listdir(folder)):
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(SPLIT_SECOND)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
