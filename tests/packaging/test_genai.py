"""A folder for onnxruntime-genai: what is in it, that it generates the source's tokens, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.environments import python_with
from support.genai_folders import builder_folder
from support.paths import BENCHMARKS, MODELS, ROOT, TESTS
from support.texts import sentences

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.data import TextOptions
from gapa_onnx.errors import DataWarning, UserError
from gapa_onnx.model import weights
from gapa_onnx.packaging import folder as writing
from gapa_onnx.packaging.stacks import STACKS

pytest.importorskip("tokenizers")
LIBRARY = gapa_onnx.library_path()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")

BLOCKS = 2
CLIENT = ROOT / "clients" / "genai" / "generate.py"


@dataclass(frozen=True)
class Case:
    built: Path  #: the folder of the model builder, with the converted file in it
    file: Path
    folder: Path  #: the package


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A decoder that was converted with its weights in a file, and packaged."""
    folder = tmp_path_factory.mktemp("genai")
    source = builder_folder(folder / "built", BLOCKS)
    (folder / "corpus.txt").write_text("\n".join(sentences(40, 0, 20, 60)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "LARGE_TENSOR", 4096)
        patch.setattr(weights, "LARGE_MODEL", 8192)
        gapa_onnx.convert(
            source,
            folder / "corpus.txt",
            source.with_name("net.onnx"),
            text=TextOptions(source.with_name("tokenizer.json"), seq_len=16),
            task="logits=tokens",
            top_k=20,
            m=40,
            k=5,
        )
    gapa_onnx.package(source.with_name("net.onnx"), "genai", folder / "package")
    return Case(source.parent, source.with_name("net.onnx"), folder / "package")


@pytest.fixture(scope="module")
def genai() -> Path:
    """An interpreter that has onnxruntime-genai, and not gapa_onnx. Of its own: it brings the plain onnxruntime, which
    lies in the same folder as the one that the tests run on."""
    return python_with("genai", "onnxruntime-genai", "numpy")


def run(python: Path, *arguments: object) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------------- what is in it


def weights_of(folder: Path) -> str:
    """The file of the converted model's weights; its name tells what is in it."""
    (name,) = (path.name for path in folder.glob("net.onnx.*.data"))
    return name


def test_the_folder_has_what_generation_needs(case: Case):
    assert LIBRARY is not None
    weights = weights_of(case.built)
    assert {path.name for path in case.folder.iterdir()} == {
        "genai_config.json", "net.onnx", weights, LIBRARY.name, "tokenizer.json", "tokenizer_config.json",
        "uncertainty.json", "generate.py", "README.md",
    }  # fmt: skip
    for name in ("net.onnx", weights, "tokenizer.json", "tokenizer_config.json"):
        assert (case.folder / name).read_bytes() == (case.built / name).read_bytes()
    assert (case.folder / LIBRARY.name).read_bytes() == LIBRARY.read_bytes()
    assert (case.folder / "generate.py").read_bytes() == CLIENT.read_bytes()


def test_the_configuration_differs_in_file_and_library_only(case: Case):
    assert LIBRARY is not None
    before, after = (json.loads((f / "genai_config.json").read_text()) for f in (case.built, case.folder))
    before["model"]["decoder"]["filename"] = "net.onnx"
    before["model"]["decoder"]["session_options"]["custom_ops_library"] = LIBRARY.name
    assert after == before


def test_the_names_of_the_uncertainty_are_outputs_of_the_model(case: Case):
    told = json.loads((case.folder / "uncertainty.json").read_text())
    outputs = {value.name for value in onnx.load(case.file, load_external_data=False).graph.output}
    assert {"score", "pvalue", "ood", "entropy", "epistemic", "tokens", "probs"} <= set(told["outputs"])
    assert set(told["outputs"].values()) <= outputs
    assert told["of"] == "logits" and told["flagged_at"]["score"]["p_value"] == 0.05


def test_the_readme_is_short_and_names_the_library(case: Case):
    assert LIBRARY is not None
    text = (case.folder / "README.md").read_text()
    assert LIBRARY.name in text and "pip install onnxruntime-genai" in text
    assert len(text.splitlines()) <= 12 and "/" + "tmp" not in text


def test_a_missing_tokenizer_comes_out_of_the_file(case: Case, tmp_path: Path):
    shutil.copytree(case.built, tmp_path / "built")
    (tmp_path / "built" / "tokenizer.json").unlink()
    gapa_onnx.package(tmp_path / "built" / "net.onnx", "genai", tmp_path / "package")
    assert (tmp_path / "package" / "tokenizer.json").read_bytes() == (
        case.built / "tokenizer.json"
    ).read_bytes()


def test_what_lies_elsewhere_is_given_by_an_option(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for name in ("net.onnx", weights_of(case.built)):
        shutil.copy(case.built / name, tmp_path)
    (tmp_path / "package").mkdir()  # an empty folder may be there
    arguments = ["package", str(tmp_path / "net.onnx"), "--for", "genai", "-o", str(tmp_path / "package")]
    assert main([*arguments, "--beside", str(case.built), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["files"]) == {path.name for path in case.folder.iterdir()}
    assert {path.name for path in (tmp_path / "package").iterdir()} == set(told["files"])


def test_other_models_of_the_configuration_come_along(case: Case, tmp_path: Path):
    built = shutil.copytree(case.built, tmp_path / "built")
    (built / "sub").mkdir()
    shutil.copy(built / "model.onnx", built / "sub" / "eyes.onnx")
    shutil.copy(built / "model.onnx.data", built / "sub")
    edit(built, lambda model: model.update(vision={"filename": "sub/eyes.onnx"}))
    made = gapa_onnx.package(built / "net.onnx", "genai", tmp_path / "package")
    assert {"sub/eyes.onnx", "sub/model.onnx.data"} <= set(made.files)
    for name in ("eyes.onnx", "model.onnx.data"):
        assert (tmp_path / "package" / "sub" / name).read_bytes() == (built / "sub" / name).read_bytes()


def test_another_tokenizer_is_warned_of(case: Case, tmp_path: Path):
    built = shutil.copytree(case.built, tmp_path / "built")
    plain = json.loads((built / "tokenizer.json").read_text())
    (built / "tokenizer.json").write_text(json.dumps(plain))  # the same in other characters
    with pytest.warns(DataWarning, match="not the tokenizer that"):
        gapa_onnx.package(built / "net.onnx", "genai", tmp_path / "package")


# -------------------------------------------------------------------------- generation


def test_the_folder_generates_the_tokens_of_the_source(case: Case, genai: Path):
    count = 12
    names = [f"logits_{role}" for role in ("tokens", "score", "pvalue", "ood", "entropy", "epistemic")]
    script = TESTS / "support" / "generation.py"
    source = json.loads(run(genai, script, case.built, count))
    made = json.loads(run(genai, script, case.folder, count, *names))
    assert made["tokens"] == source["tokens"] and len(made["tokens"]) == 8 + count
    assert len(made["told"]) == count

    # The same by one run over the whole text, without a cache. A step differs from it by what attention sums in
    # another order: some hundred roundings of numbers near 1, which the share's logarithm may enlarge tenfold.
    session = gapa_onnx.session(case.file)
    ids = np.array([made["tokens"]], np.int64)
    empty = np.zeros((1, 2, 0, 16), np.float32)
    past = {f"past_key_values.{i}.{part}": empty for i in range(BLOCKS) for part in ("key", "value")}
    whole = session.run(names, {"input_ids": ids, "attention_mask": np.ones_like(ids), **past})
    for name, expected in zip(names, whole):
        steps = [np.array(entry[name]) for entry in made["told"]]
        assert [step.shape[:2] for step in steps] == [(1, 8)] + [(1, 1)] * (count - 1), name
        joined = np.concatenate(steps, axis=1)
        if name == "logits_tokens":
            assert (joined[..., 0] == expected[:, :-1, 0]).all()
            assert joined[0, 7:, 0].tolist() == made["tokens"][8:]  # each was the most probable
        elif name == "logits_ood":
            assert (joined == expected[:, :-1]).all()
        else:
            np.testing.assert_allclose(joined, expected[:, :-1], rtol=1e-3, atol=1e-4, err_msg=name)


def test_the_example_generates_and_writes_a_page(case: Case, genai: Path, tmp_path: Path):
    page, table = tmp_path / "page.html", tmp_path / "tokens.json"
    script = case.folder / "generate.py"
    shown = run(genai, script, "the cat sat on", "--max-tokens", 6, "--html", page, "--json", table)
    tokens = json.loads(table.read_text())
    assert "".join(token["text"] for token in tokens) == shown.removesuffix("\n\n")
    assert shown.startswith("the cat sat on")
    made = [token for token in tokens if not token["given"]]
    assert len(made) == 6 and tokens[0]["score"] is None  # nothing is known in front of the first
    for token in tokens[1:]:
        assert 0 < token["pvalue"] <= 1 and token["entropy"] > 0
        assert token["flagged"] == (round(token["pvalue"], 6) <= 0.05)
        assert len(token["alternatives"]) == 5
    assert page.read_text().count("tabindex=") == len(tokens)


def test_the_code_of_the_page_runs(case: Case, genai: Path, tmp_path: Path):
    text = (ROOT / "docs" / "language-models.md").read_text(encoding="utf-8")
    (code,) = [
        part.split("```")[0] for part in text.split("```python\n") if "og.Model" in part.split("```")[0]
    ]
    code = code.replace('"trusted"', repr(str(case.folder))).replace("max_length=200", "max_length=12")
    (tmp_path / "page.py").write_text(code.replace("The capital of France is", "the cat"))
    shown = run(genai, tmp_path / "page.py")
    values = [float(value) for value in re.findall(r"\((\d\.\d\d)\)", shown)]
    assert len(values) >= 5 and all(0 <= value <= 1 for value in values)


def test_the_benchmark_compares_tokens_and_time(case: Case, genai: Path):
    script = BENCHMARKS / "paper" / "language" / "generation.py"
    found = json.loads(run(genai, script, case.built, case.folder, "--tokens", 12, "--json"))
    assert found["same"] == found["prompts"] == 8 and 8 * 4 < found["tokens"] <= 8 * 12
    for name in ("ratio", "control"):
        assert 0 < found[name]["low"] <= found[name]["median"] <= found[name]["high"]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The example as a module; nothing of onnxruntime-genai is used in what is tested of it here."""
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", types.ModuleType("onnxruntime_genai"))
    spec = importlib.util.spec_from_file_location("generate_example", CLIENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_colours_go_by_the_p_value_and_the_flag(client: types.ModuleType):
    def step(by: str = "pvalue", **known: object) -> int:
        return int(client.Token("x", given=False, **known).step(by))

    assert [step(pvalue=p, flagged=p <= 0.05) for p in (1.0, 0.31, 0.3, 0.11, 0.1, 0.06, 0.05)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
    ]
    assert step() == 0 and step("entropy") == 0
    assert [step("entropy", entropy=np.log(n)) for n in (1, 3.9, 4.1, 17, 65)] == [0, 0, 1, 2, 3]
    flagged = client.Token("x", given=False, pvalue=0.01, flagged=True)
    assert client.coloured(flagged, "pvalue", colours=False) == "x"
    assert client.coloured(flagged, "pvalue", colours=True) == f"{client.TERMINAL[3]}x{client.PLAIN}"
    assert client.coloured(client.Token("x", given=False), "pvalue", colours=True) == "x"


def test_the_page_needs_nothing_and_is_not_broken_by_text(client: types.ModuleType):
    hostile = "</script><b>&\"'{}"
    tokens = [client.Token(hostile, given=True), client.Token("a", given=False, pvalue=0.01, flagged=True)]
    page = client.page(hostile, tokens, "pvalue")
    assert "http" not in page and "src=" not in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("</script>") == 1 and "<b>" not in page
    data = page.split("const tokens = ")[1].split(";\nconst panel")[0]
    assert [token["text"] for token in json.loads(data)] == [hostile, "a"]
    assert "1 tokens, 1 flagged as strange" in page


# --------------------------------------------------------------------------- refusals


def edit(built: Path, change: Callable[[dict], object]) -> None:
    """Change the part "model" of the configuration."""
    path = built / "genai_config.json"
    plain = json.loads(path.read_text())
    change(plain["model"])
    path.write_text(json.dumps(plain))


def without(*names: str) -> Callable[[Path], None]:
    return lambda built: [(built / name).unlink() for name in names] and None


def written(name: str, text: str) -> Callable[[Path], object]:
    return lambda built: (built / name).write_text(text)


def lost_vocabulary(built: Path) -> None:
    """No tokenizer beside the model, and none in the file."""
    (built / "tokenizer.json").unlink()
    proto = onnx.load(built / "net.onnx", load_external_data=False)
    left = [entry for entry in proto.metadata_props if entry.key != "gapa_onnx_tokenizer"]
    del proto.metadata_props[:]
    proto.metadata_props.extend(left)
    onnx.save(proto, built / "net.onnx")


def other_source(built: Path) -> None:
    proto = onnx.load(built / "model.onnx", load_external_data=False)
    proto.producer_name = "somebody else"
    onnx.save(proto, built / "model.onnx")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "configuration": (without("genai_config.json"), "there is no genai_config.json in"),
    "tokenizer's settings": (without("tokenizer_config.json"), "there is no tokenizer_config.json in"),
    "tokenizer": (lost_vocabulary, "there is no tokenizer in"),
    "weights": (lambda built: (built / weights_of(built)).unlink(), "the external data of"),
    "broken configuration": (written("genai_config.json", "{"), "is not JSON"),
    "list": (written("genai_config.json", "[]"), "is not a configuration"),
    "no decoder": (written("genai_config.json", "{}"), "names no decoder"),
    "pipeline": (
        written("genai_config.json", '{"model": {"decoder": {"pipeline": []}}}'),
        "cuts the decoder into several files",
    ),
    "options": (
        lambda b: edit(b, lambda m: m["decoder"].update(session_options=[])),
        "session_options is not an object",
    ),
    "library": (
        lambda b: edit(b, lambda m: m["decoder"]["session_options"].update(custom_ops_library="x.so")),
        "loads a library already: x.so",
    ),
    "another source": (other_source, "is not the model that"),
    "other inputs": (
        lambda b: edit(b, lambda m: m["decoder"]["inputs"].update(past_key_names="cache_%d")),
        "has no input 'cache_0'",
    ),
    "other outputs": (
        lambda b: edit(b, lambda m: m["decoder"]["outputs"].update(logits="scores")),
        "has no output 'scores'",
    ),
    "lost part": (
        lambda b: edit(b, lambda m: m.update(vision={"filename": "eyes.onnx"})),
        "there is no eyes.onnx in",
    ),
    "broken part": (
        lambda b: (
            edit(b, lambda m: m.update(vision={"filename": "tokenizer_config.json.onnx"}))
            or (b / "tokenizer_config.json.onnx").write_text("{}")
        ),
        "is not an ONNX file",
    ),
    "outside": (
        lambda b: edit(b, lambda m: m.update(vision={"filename": "../x.onnx"})),
        "leads out of the folder",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_missing_or_wrong_is_said(
    name: str, case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    change, message = REFUSED[name]
    built = shutil.copytree(case.built, tmp_path / "built")
    change(built)
    refused(built / "net.onnx", tmp_path / "package", message, capsys)


def refused(
    file: Path, out: Path, message: str, capsys: pytest.CaptureFixture[str], stack: str = "genai"
) -> None:
    before = sorted(out.parent.rglob("*"))
    assert main(["package", str(file), "--for", stack, "-o", str(out)]) == 2
    told = capsys.readouterr()
    error, hint = told.err.splitlines()
    assert error.startswith("error: ") and message in error and hint.startswith("hint: ")
    assert told.out == "" and "`" not in error + hint.replace("`gapa-onnx doctor`", "")
    assert sorted(out.parent.rglob("*")) == before


def test_what_is_no_converted_decoder_is_refused(
    case: Case, digits_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "package"
    refused(case.built / "model.onnx", out, "is not converted", capsys)
    refused(digits_file, out, "is not a decoder with a cache", capsys)
    refused(tmp_path / "nothing.onnx", out, "no such file", capsys)
    refused(MODELS / "digits_mlp_heldout.npz", out, "is not an ONNX file", capsys)


def test_a_folder_that_cannot_be_written_is_refused(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    file.write_text("mine")
    refused(case.file, full, "the folder is not empty", capsys)
    refused(case.file, file, "is no folder", capsys)
    refused(case.file, tmp_path / "no" / "package", "does not exist", capsys)
    assert (full / "mine.txt").read_text() == "mine" == file.read_text()


def test_an_unknown_stack_is_told_which_there_are(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    refused(case.file, tmp_path / "package", "there is no package for 'tritn'", capsys, "tritn")
    with pytest.raises(UserError) as refusal:
        gapa_onnx.package(case.file, "tritn", tmp_path / "package")
    assert refusal.value.hint == f"choose one of {', '.join(STACKS)}"


def test_a_missing_library_is_said(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GAPA_ONNX_LIBRARY", "")
    refused(case.file, tmp_path / "package", "the native library is missing", capsys)


def test_nothing_is_left_behind_by_a_full_disk(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    copied: list[int] = []

    def copyfile(source: Path, path: Path) -> None:
        if copied:
            raise OSError(28, "No space left on device")
        copied.append(path.write_bytes(source.read_bytes()))

    monkeypatch.setattr(writing.shutil, "copyfile", copyfile)
    refused(case.file, tmp_path / "package", "No space left on device", capsys)
    assert copied  # so that something was there to be left
