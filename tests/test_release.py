"""The wheels of a release: what is in which, what they ask for, and that the same content gives the same bytes."""

from __future__ import annotations

import email
import importlib.metadata
import subprocess
import sys
import zipfile
from pathlib import Path

import gapa_onnx_runtime
import pytest
import release
import wheel_file
from support.paths import MODELS, ROOT

import gapa_onnx

WITHOUT_ONNXRUNTIME = """
import sys
sys.modules["onnxruntime"] = None  # as if it were not installed
from gapa_onnx.cli import main
sys.exit(main(sys.argv[1:]))
"""
TARGET = release.TARGETS["linux-x86_64"]

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="the files of a release are those that git knows"
)


@pytest.fixture(scope="module")
def wheels() -> dict[str, wheel_file.Wheel]:
    made = (release.core(), release.front(), release.runtime(TARGET, b"\x7fELF", b"{}"))
    return {wheel.name: wheel for wheel in made}


def about(wheel: wheel_file.Wheel) -> email.message.Message:
    return email.message_from_string(wheel.metadata)


def required(wheel: wheel_file.Wheel) -> list[str]:
    found = about(wheel).get_all("Requires-Dist") or []
    return [text for text in found if "extra ==" not in text]


def test_no_file_is_in_two_and_together_they_are_what_pip_installs_from_the_repository(wheels):
    core, native = wheels["gapa-onnx-core"].files, wheels["gapa-onnx-runtime"].files
    assert not wheels["gapa-onnx"].files and not set(core) & set(native)
    installed = importlib.metadata.files("gapa-onnx")
    if installed is None or not any(file.name == TARGET.library for file in installed):
        pytest.skip("gapa-onnx is not installed with its library")
    here = {str(file) for file in installed if "__pycache__" not in file.parts}
    assert {*core, *native} == {
        name for name in here if name.startswith("gapa_onnx") and ".dist-info" not in name
    }


def test_only_the_one_in_front_asks_for_an_onnxruntime(wheels):
    def of_onnxruntime(wheel: wheel_file.Wheel) -> list[str]:
        return [text for text in required(wheel) if text.startswith("onnxruntime")]

    assert len(of_onnxruntime(wheels["gapa-onnx"])) == 2  # the one or the other, by platform
    assert not of_onnxruntime(wheels["gapa-onnx-core"])
    assert required(wheels["gapa-onnx-runtime"]) == []


def test_versions_are_one(wheels):
    version = gapa_onnx.__version__
    assert gapa_onnx_runtime.__version__ == version
    assert {wheel.version for wheel in wheels.values()} == {version}
    assert f"gapa-onnx-core=={version}" in required(wheels["gapa-onnx"])
    native = [text for text in required(wheels["gapa-onnx-core"]) if text.startswith("gapa-onnx-runtime")]
    assert native and all(text.startswith(f"gapa-onnx-runtime=={version};") for text in native)


def test_extras_are_those_of_the_code(wheels):
    extras = about(wheels["gapa-onnx"]).get_all("Provides-Extra")
    assert extras and extras == about(wheels["gapa-onnx-core"]).get_all("Provides-Extra")
    asked = [text for text in about(wheels["gapa-onnx"]).get_all("Requires-Dist") if "extra ==" in text]
    assert len(asked) == len(extras) and all(text.startswith("gapa-onnx-core[") for text in asked)


def test_the_same_content_gives_the_same_bytes(wheels, tmp_path):
    date = 1_700_000_000
    for number, wheel in enumerate(wheels.values()):
        turned = {**vars(wheel), "files": dict(reversed(wheel.files.items()))}
        paths = []
        for folder, one in (("a", wheel), ("b", wheel_file.Wheel(**turned))):
            (tmp_path / f"{folder}{number}").mkdir()
            paths.append(wheel_file.write(one, tmp_path / f"{folder}{number}", date))
        assert paths[0].read_bytes() == paths[1].read_bytes()
        other = wheel_file.write(wheel, tmp_path, date + 86400)
        assert other.read_bytes() != paths[0].read_bytes()


def test_pip_takes_them(wheels, tmp_path):
    """pip checks names, tags and hashes, and `pip check` would miss nothing here: requirements are not installed."""
    for wheel in wheels.values():
        wheel_file.write(wheel, tmp_path, 1_700_000_000)
    paths = sorted(map(str, tmp_path.glob("*.whl")))
    assert len(paths) == len(wheels)
    where = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(where)]
    subprocess.run([*pip, "--no-compile", *paths], check=True)
    for wheel in wheels.values():
        for name, content in wheel.files.items():
            assert (where / name).read_bytes() == content
    assert (where / "bin" / "gapa-onnx").is_file()
    for path in paths:
        with zipfile.ZipFile(path) as archive:
            told = [name for name in archive.namelist() if "/licenses/" in name or "/sboms/" in name]
        assert any(name.endswith("licenses/LICENSE") for name in told)
        assert (len(told) > 1) == ("gapa_onnx_runtime" in path), told  # what is linked is in there alone


def test_without_any_onnxruntime_there_is_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ONNXRUNTIME, "inspect", str(MODELS / "digits_mlp.onnx")],
        capture_output=True,
        text=True,
        cwd=tmp_path,  # away from the checkout, which has no gapa_onnx.cli
    )
    assert done.returncode == 2 and done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error == "error: there is no onnxruntime" and "pip install onnxruntime-gpu" in hint


def test_without_any_onnxruntime_the_python_names_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    for name in [name for name in sys.modules if name.startswith("gapa_onnx.sessions")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(gapa_onnx.UserError, match="there is no onnxruntime"):
        _ = gapa_onnx.session


def test_a_library_that_is_missing_is_said(monkeypatch, tmp_path):
    assert Path(gapa_onnx_runtime.library_path()).parent.name == "gapa_onnx_runtime"
    monkeypatch.delenv("GAPA_ONNX_LIBRARY", raising=False)
    monkeypatch.setattr(gapa_onnx_runtime, "__path__", [str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="install gapa-onnx-runtime again"):
        gapa_onnx_runtime.library_path()
    assert gapa_onnx.library_path() is None
