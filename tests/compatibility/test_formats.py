"""Files of every format that ever existed run in any session, with the answers that they had when they were made.

docs/file-format.md, "What keeps working", is the policy; make_files.py makes the files.
"""

from __future__ import annotations

import io
import re
import tarfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.paths import ROOT

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.op.contract import DOMAIN, PREPARED, SCHEMAS, VERSION
from gapa_onnx.record import FORMAT, METADATA_KEY

FILES = Path(__file__).parent / "files"
FORMATS = range(FORMAT + 1)
NAMES = ("classes", "flat", "ivf", "ivfpq", "hnsw")
LIBRARY = gapa_onnx.library_path()


@lru_cache
def archive(number: int) -> dict[str, bytes]:
    path = FILES / f"format{number}.tar.xz"
    assert path.is_file(), (
        f"record.FORMAT is {FORMAT}: say in make_files.py what wrote format {number}, and run it"
    )
    with tarfile.open(path) as packed:
        return {entry.name: packed.extractfile(entry).read() for entry in packed.getmembers()}  # type: ignore[union-attr]


def kept(number: int, name: str) -> tuple[bytes, dict[str, np.ndarray]]:
    """A file, and its input x and answers."""
    files = archive(number)
    with np.load(io.BytesIO(files[f"{name}.npz"])) as arrays:
        return files[f"{name}.onnx"], dict(arrays)


@pytest.mark.parametrize("native", [pytest.param(False, id="portable"), pytest.param(True, id="native")])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", FORMATS)
def test_answers_are_those_of_the_day(number, name, native):
    """As exact as the two bodies of an operator agree: rounding of float32, which the difference of two entropies of
    about 1 shows as some 1e-7 absolute."""
    if native and LIBRARY is None:
        pytest.skip("the native library is not built")
    content, answers = kept(number, name)
    options = ort.SessionOptions()
    if native:
        options.register_custom_ops_library(str(LIBRARY))
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    assert {*names, "x"} == set(answers)
    for output, value in zip(names, session.run(names, {"x": answers["x"]})):
        if value.dtype == bool:
            np.testing.assert_array_equal(value, answers[output])
        else:
            np.testing.assert_allclose(value, answers[output], rtol=2e-5, atol=5e-7, err_msg=output)


def test_the_library_knows_every_operator_that_these_files_have():
    """So the test above runs the library's kernels, not the functions in the files."""
    used = set()
    for number in FORMATS:
        for name in NAMES:
            model = onnx.load_from_string(kept(number, name)[0])
            used |= {node.op_type for node in model.graph.node if node.domain == DOMAIN}
            assert {entry.version for entry in model.opset_import if entry.domain == DOMAIN} == {VERSION}
            assert {f.name for f in model.functions} >= {
                n.op_type for n in model.graph.node if n.domain == DOMAIN
            }
    kinds = {schema.name for schema in SCHEMAS.values()}
    later = {SCHEMAS[kind].name for kind in ("local", PREPARED)}
    assert used >= kinds - later and used - kinds == {"GapaClasses"}


@pytest.mark.parametrize("number", FORMATS)
def test_the_record_is_read_or_the_reason_said(number, tmp_path, capsys):
    path = tmp_path / "flat.onnx"
    content, answers = kept(number, "flat")
    path.write_bytes(content)
    np.savez(tmp_path / "x.npz", x=answers["x"])
    for command in (["inspect", str(path)], ["run", str(path), "--data", str(tmp_path / "x.npz")]):
        code = main(command)
        said = capsys.readouterr()
        if number == FORMAT:
            assert code == 0 and said.err == ""
            continue
        error, hint = said.err.splitlines()
        assert code == 2 and f"an older gapa-onnx, with a record of format {number}" in error
        assert "convert the source model again" in hint and "runs as it did" in hint


def test_every_format_has_its_files():
    numbers = {int(re.findall(r"format(\d+)", path.name)[0]) for path in FILES.iterdir()}
    assert numbers == set(FORMATS)
    for number in FORMATS:
        for name in NAMES:
            (entry,) = [
                e
                for e in onnx.load_from_string(kept(number, name)[0]).metadata_props
                if e.key == METADATA_KEY
            ]
            if number:
                assert f'"format": {number},' in entry.value or f'"format":{number},' in entry.value
            else:
                assert '"format"' not in entry.value
    assert "## What keeps working" in (ROOT / "docs" / "file-format.md").read_text()
