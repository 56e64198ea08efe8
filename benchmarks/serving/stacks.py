"""How each server is installed, started from its package, and reached."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

SHIFT = 10_000  # all ports of a package are moved by so many, away from what else runs here
READY_SECONDS = 180


@dataclass(frozen=True)
class Server:
    """A stack in an environment of its own."""

    install: tuple[str, ...]
    port: int
    files: tuple[str, ...]  #: of the package, that name its ports
    command: Callable[[Path, Path], list[str]]  #: of the environment and the folder
    environment: Callable[[Path], Mapping[str, str]]
    ready: str  #: path that answers 200 when the model is loaded
    nulls: bool = True  #: whether its JSON takes a null for a NaN

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port + SHIFT}"


def _of_venv(venv: Path) -> dict[str, str]:
    return {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"}


def _site_packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python3*")) / "site-packages"


def _ray_environment(venv: Path) -> dict[str, str]:
    """A cluster of its own, whatever else of Ray runs on this machine."""
    return _of_venv(venv) | {
        "RAY_ADDRESS": "local",
        "RAY_DISABLE_MEMORY_MONITOR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _triton_command(venv: Path, folder: Path) -> list[str]:
    """The server of nvidia-pytriton; its Python backend wants the stub of this Python beside it."""
    home = _site_packages(venv) / "pytriton" / "tritonserver"
    backends = venv / "backends"
    if not backends.is_dir():
        shutil.copytree(home / "backends", backends)
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        shutil.copy(
            home / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python"
        )
    options = {
        "model-repository": "models",
        "model-config-name": "python",
        "backend-directory": backends,
        "http-port": SERVERS["triton"].port + SHIFT,
        "allow-grpc": "false",
        "allow-metrics": "false",
    }
    return [str(home / "bin" / "tritonserver"), *(f"--{name}={value}" for name, value in options.items())]


def _triton_environment(venv: Path) -> dict[str, str]:
    libraries = subprocess.run(
        [venv / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    packages = _site_packages(venv)
    return _of_venv(venv) | {
        "PYTHONPATH": str(packages),
        "LD_LIBRARY_PATH": f"{packages / 'nvidia_pytriton.libs'}:{libraries}",
    }


SERVERS: dict[str, Server] = {
    "ray": Server(
        ("ray[serve]",),
        8000,
        ("serve_config.yaml",),
        lambda venv, folder: [str(venv / "bin" / "serve"), "run", "serve_config.yaml"],
        _ray_environment,
        "/v2/models/digits/ready",
    ),
    "mlserver": Server(
        ("mlserver",),
        8080,
        ("settings.json",),
        lambda venv, folder: [str(venv / "bin" / "mlserver"), "start", "."],
        _of_venv,
        "/v2/models/digits/ready",
    ),
    "bentoml": Server(
        ("bentoml",),
        3000,
        (),
        lambda venv, folder: [str(venv / "bin" / "bentoml"), "serve", ".", "--port", str(3000 + SHIFT)],
        _of_venv,
        "/readyz",
    ),
    "triton": Server(
        ("nvidia-pytriton",),
        8500,  # given by an option; 8000 is Ray's
        (),
        _triton_command,
        _triton_environment,
        "/v2/models/digits/ready",
        nulls=False,
    ),
}


def environment(stack: str, folder: Path) -> Path:
    """The virtual environment of a stack, made on the first call."""
    venv = folder / stack
    if not (venv / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        wanted = [*SERVERS[stack].install, "onnxruntime", "numpy"]
        subprocess.run([venv / "bin" / "pip", "install", "-q", *wanted], check=True)
        (venv / "ready").touch()
    return venv


def versions(venv: Path, stack: str) -> dict[str, str]:
    names = [re.sub(r"\[.*", "", SERVERS[stack].install[0]), "onnxruntime"]
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    told = subprocess.run(
        [venv / "bin" / "python", "-c", code, *names], capture_output=True, text=True, check=True
    )
    return dict(zip(names, told.stdout.split()))


def retargeted(stack: str, folder: Path) -> None:
    """Move the ports that a package names."""
    for name in SERVERS[stack].files:
        text = (folder / name).read_text()
        (folder / name).write_text(re.sub(r"\b(80\d\d)\b", lambda found: str(int(found[1]) + SHIFT), text))


def with_source(stack: str, folder: Path, source: Path) -> None:
    """The source model in the place of the converted one, served by the same files."""
    home = folder / "models" / "digits" / "1" if stack == "triton" else folder
    about = json.loads((home / "gapa.json").read_text())
    shutil.copy(source, home / source.name)
    (home / "gapa.json").write_text(json.dumps({**about, "model": source.name, "library": None}))
    settings = folder / "model-settings.json"
    if settings.exists():
        plain = json.loads(settings.read_text())
        plain["outputs"] = [entry for entry in plain["outputs"] if entry["name"] == "logits"]
        settings.write_text(json.dumps(plain))
    for path in folder.glob("models/*/configs/*.pbtxt"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(x for x in lines if not x.startswith("output") or 'name: "logits" ' in x))


@contextmanager
def serving(stack: str, venv: Path, folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server while it runs; it and what it has started are ended with it."""
    server = SERVERS[stack]
    if _answers(server.url + server.ready):
        raise SystemExit(f"something else answers at {server.url} already")
    with log.open("wb") as out:
        process = subprocess.Popen(
            server.command(venv, folder),
            cwd=folder,
            env={**os.environ, **server.environment(venv)},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # else it would ignore what it is ended by, where this program has been started to do so
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            _wait(process, server.url + server.ready, log)
            yield process
        finally:
            started = family(process.pid)
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for child in started[1:]:  # those that have not gone along
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    last = time.monotonic() + READY_SECONDS
    while time.monotonic() < last:
        if process.poll() is not None:
            break
        if _answers(url):
            return
        time.sleep(0.5)
    raise SystemExit(f"{url} does not answer:\n{log.read_text(errors='replace')[-2000:]}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def family(pid: int) -> list[int]:
    """A process and all that it has started, and these have started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:  # gone meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def resident(pid: int) -> int:
    """Bytes in memory of a process and all that it has started."""
    total = 0
    for one in family(pid):
        try:
            text = Path(f"/proc/{one}/status").read_text()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS"))
    return total
