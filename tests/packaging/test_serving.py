"""Folders for servers and for C++: all files are there, settings are what their own parsers read, and the model answers."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import yaml
from support.environments import python_with
from support.paths import MODELS, ROOT

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.packaging.stacks import STACKS
from gapa_onnx.sessions.runtime import library_path

pytestmark = pytest.mark.skipif(library_path() is None, reason="the native library is not built")

SERVERS = ("triton", "kserve", "mlserver", "ray", "bentoml")
SHARED = {"README.md", "client.py", "client.json"}
RUNNER = {"digits.gapa.onnx", "libgapa_onnx.so", "gapa.json", "gapa_model.py", "gapa_metrics.py"}
#: Where the model lies, and what else is in the folder.
FOLDERS = {
    "triton": (
        "models/digits/1",
        {"model.py"},
        {"models/digits/config.pbtxt", "models/digits/configs/python.pbtxt"},
    ),
    "kserve": (
        "model",
        {"served.py", "model-settings.json", "settings.json", "requirements.txt"},
        {"Dockerfile", "inferenceservice.yaml"},
    ),
    "mlserver": ("", {"served.py", "model-settings.json", "settings.json", "requirements.txt"}, set()),
    "ray": ("", {"app.py", "requirements.txt"}, {"serve_config.yaml"}),
    "bentoml": ("", {"service.py", "requirements.txt"}, {"bentofile.yaml"}),
}


@pytest.fixture(scope="module")
def packages(digits_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each stack, of the digits classifier."""
    folder = tmp_path_factory.mktemp("packages")
    for stack in (*SERVERS, "cpp"):
        made = gapa_onnx.package(digits_file, stack, folder / stack)
        assert set(made.files) == files(folder / stack) and all(made.files.values())
    return {stack: folder / stack for stack in (*SERVERS, "cpp")}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def runner(packages: dict[str, Path]) -> Iterator[types.ModuleType]:
    """gapa_model as a server imports it: from the folder."""
    sys.path.insert(0, str(packages["mlserver"]))
    yield importlib.import_module("gapa_model")
    sys.path.remove(str(packages["mlserver"]))


@pytest.fixture(scope="module")
def model(packages: dict[str, Path], runner: types.ModuleType):
    return runner.Model(packages["mlserver"])


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    held = np.load(MODELS / "digits_mlp_calibration.npz")
    return held[held.files[0]][:20].astype(np.float32)


@pytest.mark.parametrize("stack", SERVERS)
def test_a_folder_has_all_that_its_stack_wants(stack: str, packages: dict[str, Path], digits_file: Path):
    home, beside_model, others = FOLDERS[stack]
    wanted = SHARED | others | {str(Path(home, name)) for name in RUNNER | beside_model}
    assert files(packages[stack]) == wanted
    model = packages[stack] / home / "digits.gapa.onnx"
    assert model.read_bytes() == digits_file.read_bytes()
    assert (model.parent / "libgapa_onnx.so").read_bytes() == library_path().read_bytes()
    readme = (packages[stack] / "README.md").read_text()
    assert len(readme.strip().splitlines()) <= 12 and "GAPA_ONNX_K" in readme and "libgapa_onnx.so" in readme
    assert not re.search(r"[{}]", readme) and "/tmp" not in readme
    assert json.loads((packages[stack] / "client.json").read_text())["inputs"] == [
        {"name": "pixels", "datatype": "FP32", "shape": [-1, 64]}
    ]


def test_what_comes_next_is_in_the_readme(digits_file: Path, tmp_path: Path):
    shown = {stack: gapa_onnx.package(digits_file, stack, tmp_path / stack).next for stack in ("ray", "cpp")}
    assert (
        shown["ray"]
        == f"cd {tmp_path / 'ray'} && pip install -r requirements.txt && serve run serve_config.yaml"
    )
    assert shown["cpp"].startswith(
        f"cd {tmp_path / 'cpp'} && cmake -B build && cmake --build build && build/gapa_run"
    )


def test_settings_are_json_and_yaml(packages: dict[str, Path]):
    settings = json.loads((packages["mlserver"] / "model-settings.json").read_text())
    assert settings["implementation"] == "served.Served" and settings["name"] == "digits"
    told = {port["name"]: (port["datatype"], port["shape"]) for port in settings["outputs"]}
    assert told["logits_ood"] == ("BOOL", [-1]) and told["logits_probs"] == ("FP32", [-1, 10])
    service = yaml.safe_load((packages["kserve"] / "inferenceservice.yaml").read_text())
    assert service["kind"] == "InferenceService" and service["apiVersion"] == "serving.kserve.io/v1beta1"
    (container,) = service["spec"]["predictor"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/models/digits/ready"
    (application,) = yaml.safe_load((packages["ray"] / "serve_config.yaml").read_text())["applications"]
    assert application["import_path"] == "app:app" and application["deployments"][0]["name"] == "Served"
    assert "app = Served.bind()" in (packages["ray"] / "app.py").read_text()
    bento = yaml.safe_load((packages["bentoml"] / "bentofile.yaml").read_text())
    assert bento["service"] == "service:Served"
    assert (packages["bentoml"] / bento["python"]["requirements_txt"]).is_file()


CONFIGURATION = """
import sys
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig
print(json_format.MessageToJson(text_format.Parse(open(sys.argv[1]).read(), ModelConfig())))
"""


@pytest.mark.nightly  # NVIDIA's client is installed for it; benchmarks/serving starts Triton itself
@pytest.mark.parametrize("backend", ["onnxruntime", "python"])
def test_triton_reads_its_configuration(backend: str, packages: dict[str, Path], model):
    """By NVIDIA's own schema of model_config.proto."""
    python = python_with("triton-client", "tritonclient[grpc]")
    folder = packages["triton"] / "models" / "digits"
    path = folder / ("config.pbtxt" if backend == "onnxruntime" else "configs/python.pbtxt")
    done = subprocess.run([python, "-c", CONFIGURATION, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert read["backend"] == backend and read["name"] == "digits" and read.get("maxBatchSize", 0) == 0
    for side, ports in (("input", model.inputs), ("output", model.outputs)):
        told = {e["name"]: (e["dataType"], [int(size) for size in e["dims"]]) for e in read[side]}
        assert told == {name: (f"TYPE_{port.datatype}", list(port.shape)) for name, port in ports.items()}
    if backend == "onnxruntime":
        assert (folder / "1" / read["defaultModelFilename"]).is_file()
        (library,) = read["modelOperations"]["opLibraryFilename"]
        assert (
            packages["triton"] / library
        ).is_file()  # from the folder that the README starts the server in


FIELDS = """
import json, sys
from kserve import V1beta1InferenceService, V1beta1InferenceServiceSpec, V1beta1PredictorSpec
from kubernetes.client import V1Container, V1ContainerPort, V1Probe
kinds = (V1beta1InferenceService, V1beta1InferenceServiceSpec, V1beta1PredictorSpec, V1Container, V1ContainerPort, V1Probe)
print(json.dumps([sorted(kind.attribute_map.values()) for kind in kinds]))
"""


@pytest.mark.nightly  # KServe's own package is installed for it
def test_kserve_knows_every_field(packages: dict[str, Path]):
    python = python_with("kserve", "kserve")
    done = subprocess.run([python, "-c", FIELDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    service = yaml.safe_load((packages["kserve"] / "inferenceservice.yaml").read_text())
    predictor = service["spec"]["predictor"]
    (container,) = predictor["containers"]
    told = (
        service,
        service["spec"],
        predictor,
        container,
        container["ports"][0],
        container["readinessProbe"],
    )
    for known, fields in zip(json.loads(done.stdout), told):
        assert set(fields) <= set(known) and len(known) > 2


# --------------------------------------------------------------------- what runs the model


def asked(rows: np.ndarray, **changed: object) -> dict:
    tensor = {"name": "pixels", "datatype": "FP32", "shape": list(rows.shape), "data": rows.ravel().tolist()}
    return {"inputs": [{**tensor, **changed}]}


def decoded(answer: dict) -> dict[str, np.ndarray]:
    kinds = {"FP32": np.float32, "BOOL": np.bool_, "INT64": np.int64}
    return {
        one["name"]: np.array(one["data"], kinds[one["datatype"]]).reshape(one["shape"])
        for one in answer["outputs"]
    }


def test_answers_are_those_of_a_session_bit_for_bit(model, digits_file: Path, rows: np.ndarray):
    session = gapa_onnx.session(digits_file)
    expected = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"pixels": rows})))
    through_json = decoded(json.loads(json.dumps(model.infer(asked(rows)), allow_nan=False)))
    for found in (model.run({"pixels": rows}), through_json):
        assert list(found) == list(expected)
        for name, array in expected.items():
            assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes(), name
    chosen = model.infer({**asked(rows), "outputs": [{"name": "logits_ood"}], "id": "7"})
    assert [one["name"] for one in chosen["outputs"]] == ["logits_ood"] and chosen["id"] == "7"
    assert model.metadata()["inputs"] == [{"name": "pixels", "datatype": "FP32", "shape": [-1, 64]}]


def test_a_row_that_is_no_number_is_flagged(model, rows: np.ndarray):
    data = rows[:2].ravel().tolist()
    data[3] = None
    text = json.dumps(model.infer(asked(rows[:2], data=data)), allow_nan=False)
    answers = {one["name"]: one["data"] for one in json.loads(text)["outputs"]}
    assert answers["logits_ood"][0] is True and answers["logits_pvalue"][0] == 0
    assert answers["logits"][0] is None  # of the source, as it is


def test_an_empty_batch_has_an_empty_answer(model, rows: np.ndarray):
    answers = decoded(model.infer(asked(rows[:0])))
    assert answers["logits_probs"].shape == (0, 10) and answers["logits_ood"].shape == (0,)


WRONG = {
    "shape": ({"shape": [10, 128]}, "has the shape [10, 128]; the model takes [-1, 64]"),
    "rank": ({"shape": [1280]}, "has the shape [1280]; the model takes [-1, 64]"),
    "count": ({"shape": [3, 64]}, "has 1280 numbers, which are no [3, 64]"),
    "negative": ({"shape": [-1, 64]}, "has 1280 numbers, which are no"),
    "half a row": ({"shape": [2.5, 64]}, "cannot be read"),
    "a name that is a list": ({"name": ["pixels"]}, "there is no input ['pixels']"),
    "no shape": ({"shape": "wide"}, "cannot be read"),
    "type": ({"datatype": "FP64"}, "is FP64; the model takes FP32"),
    "name": ({"name": "x"}, "there is no input 'x', but pixels"),
    "text": ({"data": ["a"] * 1280}, "cannot be read"),
    "ragged": ({"data": [[1.0], [1.0, 2.0]]}, "cannot be read"),
    "truth": ({"data": [True] * 1280}, "bool in place of FP32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_request_is_a_sentence(case: str, model, runner, rows: np.ndarray):
    changed, message = WRONG[case]
    with pytest.raises(runner.BadRequest, match=re.escape(message)):
        model.infer(asked(rows, **changed))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ([], "a request is"),
        ({"inputs": [7]}, "an input has a name"),
        ({"inputs": [{"name": "pixels"}]}, "an input has a name"),
        ({"inputs": []}, "the input 'pixels' is missing"),
    ],
)
def test_what_is_no_request_is_told(request_: object, message: str, model, runner):
    with pytest.raises(runner.BadRequest, match=re.escape(message)):
        model.infer(request_)


def test_outputs_that_are_not_there_are_told(model, runner, rows: np.ndarray):
    for outputs, message in (
        ([{"name": "y"}], "there is no output 'y'"),
        ([{"name": []}], "there is no output"),
        ([7], "outputs are asked for as"),
    ):
        with pytest.raises(runner.BadRequest, match=message):
            model.infer({**asked(rows), "outputs": outputs})


def test_the_environment_lowers_k(packages, runner, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    full = runner.Model(packages["mlserver"]).run({"pixels": rows}, ["logits_var"])["logits_var"]
    monkeypatch.setenv("GAPA_ONNX_K", "2")
    fewer = runner.Model(packages["mlserver"]).run({"pixels": rows}, ["logits_var"])["logits_var"]
    assert (fewer >= full * (1 - 1e-4)).all() and (fewer > full * 1.01).any()


def test_what_is_served_is_counted(model, rows: np.ndarray):
    from prometheus_client import REGISTRY

    labels = {"model": "digits", "output": "logits"}
    before = REGISTRY.get_sample_value("gapa_rows_total", labels) or 0
    model.run({"pixels": rows}, ["logits"])
    assert REGISTRY.get_sample_value("gapa_rows_total", labels) == before + len(rows)


def test_triton_answers_through_its_python_backend(
    packages: dict[str, Path], rows: np.ndarray, runner, monkeypatch: pytest.MonkeyPatch
):
    """With a stand-in for what Triton gives its Python models."""
    stub = types.ModuleType("triton_python_backend_utils")
    stub.Tensor = lambda name, array: (name, array)
    stub.TritonError = str
    stub.InferenceResponse = lambda tensors=None, error=None: error or dict(tensors)
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = packages["triton"] / "models" / "digits" / "1" / "model.py"
    spec = importlib.util.spec_from_file_location("triton_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    served = module.TritonPythonModel()
    served.initialize({})

    def request(array: np.ndarray) -> types.SimpleNamespace:
        tensor = types.SimpleNamespace(name=lambda: "pixels", as_numpy=lambda: array)
        return types.SimpleNamespace(inputs=lambda: [tensor], requested_output_names=lambda: ["logits_score"])

    good, bad = served.execute([request(rows), request(rows[:, :3])])
    expected = served.model.run({"pixels": rows})["logits_score"]
    assert good["logits_score"].tobytes() == expected.tobytes() and "has the shape [20, 3]" in bad


# ------------------------------------------------------------------------------ C++, refusals


def test_the_program_builds_and_runs(packages: dict[str, Path], tmp_path: Path):
    runtimes = sorted((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so*"))
    if shutil.which("cmake") is None or not runtimes:
        pytest.skip("there is no cmake, or no libonnxruntime.so")
    folder = shutil.copytree(packages["cpp"], tmp_path / "cpp")
    readme = (folder / "README.md").read_text()
    configure, run = re.findall(r"^    (\S.*)$", readme, re.M)
    for command in (configure, run.replace("/path/to/libonnxruntime.so", str(runtimes[0]))):
        done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert "native library" in done.stdout and "logits  (1, 10)  mean ± std" in done.stdout


def convert(tmp_path: Path, text: str, feed: dict[str, np.ndarray]) -> Path:
    source = tmp_path / "Net v1.2.onnx"
    onnx.save(onnx.parser.parse_model(text), source)
    gapa_onnx.convert(source, feed, tmp_path / "Net v1.2.gapa.onnx", k=4, m=20, allow_uncovered=True)
    return tmp_path / "Net v1.2.gapa.onnx"


INTEGERS = """<ir_version: 8, opset_import: ["" : 17]>
net (float[n, 3] x, int64[n] place) => (float[n, 2] y) <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[4, 2] table = {1, 2, 3, 4, 5, 6, 7, 8}> {
    r = Relu(x)  h = MatMul(r, w)  e = Gather(table, place)  y = Add(h, e) }"""


def test_another_model_with_an_input_of_whole_numbers(tmp_path: Path):
    rng = np.random.default_rng(0)
    feed = {"x": rng.normal(size=(60, 3)).astype(np.float32), "place": rng.integers(0, 4, 60)}
    file = convert(tmp_path, INTEGERS, feed)
    made = gapa_onnx.package(file, "triton", tmp_path / "triton")
    text = (made.folder / "models" / "Net-v1" / "config.pbtxt").read_text()
    assert 'input [ { name: "place" data_type: TYPE_INT64 dims: [ -1 ] } ]' in text
    kserve = gapa_onnx.package(file, "kserve", tmp_path / "kserve").folder
    assert yaml.safe_load((kserve / "inferenceservice.yaml").read_text())["metadata"] == {"name": "net-v1"}
    with pytest.raises(UserError, match="neither float32 nor float64"):
        gapa_onnx.package(file, "cpp", tmp_path / "cpp")
    assert not (tmp_path / "cpp").exists()


def test_external_data_go_along(tmp_path: Path, digits_file: Path):
    model = onnx.load(digits_file)
    onnx.save(
        model, tmp_path / "big.onnx", save_as_external_data=True, location="big.bin", size_threshold=1000
    )
    made = gapa_onnx.package(tmp_path / "big.onnx", "mlserver", tmp_path / "package")
    assert (made.folder / "big.bin").read_bytes() == (tmp_path / "big.bin").read_bytes()


def test_the_page_of_stacks_names_all():
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [stack for stack in STACKS if f"| `{stack}` |" not in page] == []
