"""What was said about images at a conversion is in the file, and images are read so ever after."""

from __future__ import annotations

import json
import shlex
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.paths import MODELS
from support.small_models import parse as small_model

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.data import ImageOptions, InputSpec, Preparation, open_data
from gapa_onnx.errors import DataWarning, UserError
from gapa_onnx.measure import bench, verify
from gapa_onnx.record import ImageRecord, parse, read

Image = pytest.importorskip("PIL.Image")

MEAN, STD, SIZE = (0.5, 0.4, 0.3), (0.25, 0.2, 0.3), (8, 6)  #: for the channels blue, green, red
OPTIONS = ImageOptions(MEAN, STD, SIZE, colors="bgr")
RECORD = ImageRecord(*SIZE, "first", "bgr", 1, MEAN, STD)
SMALL = {"m": 40, "k": 5}


def by_hand(folder: Path, mean=MEAN, std=STD, size=SIZE) -> np.ndarray:
    """What the model is to be fed, computed without the library: (n, 3, h, w), blue first."""
    rows = []
    for path in sorted(folder.glob("*.png")):
        pixels = np.asarray(Image.open(path).resize(size[::-1], Image.BILINEAR), np.float64)
        blue_first = np.stack([pixels[..., 2], pixels[..., 1], pixels[..., 0]])
        rows.append((blue_first / 255 - np.reshape(mean, (-1, 1, 1))) / np.reshape(std, (-1, 1, 1)))
    return np.array(rows, np.float32)


def coloured_model(x: str = "float[n, 3, h, w] x", first: str = "f = Identity(x)") -> onnx.ModelProto:
    """A classifier that looks at colours and edges; `first` makes its input float and (n, 3, h, w)."""
    rng = np.random.default_rng(0)
    return small_model(
        f"net ({x}) => (float[n, 4] y) {{ {first} c = Conv(f, k)  r = Relu(c)  p = GlobalAveragePool(r)  "
        "q = Flatten(p)  z = MatMul(q, a)  h1 = Tanh(z)  y = MatMul(h1, b) }",
        k=rng.normal(size=(8, 3, 3, 3)) / 3,
        a=rng.normal(size=(8, 16)),
        b=rng.normal(size=(16, 4)),
    )


def write_images(folder: Path, rows: int, seed: int, most: int = 256) -> Path:
    """Images of several sizes in random colours."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for number in range(rows):
        height, width = rng.integers(9, 14, 2)
        colour = rng.integers(0, most, 3)
        pixels = (colour + rng.integers(-20, 20, (height, width, 3))).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return folder


@dataclass(frozen=True)
class Case:
    """A model that was converted with images, and folders of more of them."""

    source: Path
    path: Path
    calib: Path
    data: Path
    dark: Path
    labels: Path
    command: str  #: that `convert` printed as the next


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("images")
    source, path = folder / "net.onnx", folder / "net.gapa.onnx"
    onnx.save(coloured_model(), source)
    calib, data = write_images(folder / "calib", 120, 0), write_images(folder / "data", 40, 1)
    dark = write_images(folder / "shifts" / "dark_1", 40, 2, most=40)
    np.save(folder / "labels.npy", np.arange(40) % 4)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gapa_onnx.cli.render.lines", lambda *told: lines.extend(t for n, t in told if n == "next")
        )
        arguments = ["--image-mean", "0.5,0.4,0.3", "--image-std", "0.25,0.2,0.3", "--image-size", "8,6"]
        arguments += ["--image-colors", "bgr", "--m", "40", "--k", "5", "--task", "classification"]
        assert main(["convert", str(source), "--calib", str(calib), "-o", str(path), *arguments]) == 0
    return Case(source, path, calib, data, dark, folder / "labels.npy", lines[-1])


def said(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[str, list[str]]:
    """What a command prints, and its warnings, once it has gone well."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    return out, [line for line in err.splitlines() if not line.startswith("note:")]


def ran(capsys: pytest.CaptureFixture, case: Case, data: Path, *options: str) -> tuple[dict, list[str]]:
    out = case.path.with_name("answers.npz")
    _, warned = said(capsys, "run", case.path, "--data", data, "-o", out, *options)
    return dict(np.load(out)), warned


def answers(path: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    session = gapa_onnx.session(path)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x})))


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        # float32 against float64 arithmetic on the way to the input: a few roundings of numbers below 4
        np.testing.assert_allclose(found[name], array, rtol=2e-4, atol=1e-5, err_msg=name)


# ------------------------------------------------------------------------------- the record


def test_the_record_holds_how_images_were_read(case):
    record = read(onnx.load(case.path))
    assert record.images == RECORD
    assert parse(json.dumps(record.as_json())) == record
    bare = replace(record, images=None)
    assert "images" not in bare.as_json() and parse(json.dumps(bare.as_json())) == bare


def test_what_the_input_tells_is_recorded_too(tmp_path):
    calib = write_images(tmp_path / "calib", 60, 0)
    pixels = "f0 = Cast <to = 1> (x)  f = Transpose <perm = [0, 3, 1, 2]> (f0)"
    fixed = coloured_model("uint8[n, 10, 11, 3] x", pixels)
    found = read(gapa_onnx.convert(fixed, calib, **SMALL).model)
    assert found.images == ImageRecord(10, 11, "last", "rgb", 255, (0.0,), (1.0,))
    free = coloured_model("float[n, 3, 10, w] x")
    found = read(gapa_onnx.convert(free, calib, images=ImageOptions(mean=(0.5,)), **SMALL).model)
    assert found.images == ImageRecord(10, None, "first", "rgb", 1, (0.5,), (1.0,))
    rows = np.random.default_rng(0).normal(size=(60, 3, 10, 11)).astype(np.float32)
    assert read(gapa_onnx.convert(free, {"x": rows}, **SMALL).model).images is None


def test_inspect_and_a_rehearsal_show_it(case, capsys):
    line = "8 × 6, BGR, channels first, (pixel / 255 − [0.5, 0.4, 0.3]) / [0.25, 0.2, 0.3]"
    assert line in said(capsys, "inspect", case.path)[0]
    printed = json.loads(said(capsys, "inspect", "--json", case.path)[0])["provenance"]["images"]
    assert printed["mean"] == list(MEAN) and printed["colors"] == "bgr" and printed["height"] == 8
    rehearsed, _ = said(capsys, "convert", case.source, "--calib", case.calib, "--dry-run")
    assert "in their own sizes, RGB, channels first, pixel / 255" in rehearsed


# ----------------------------------------------------------------------------- the commands


def test_the_next_command_works(case, capsys):
    program, *arguments = shlex.split(case.command)
    assert program == "gapa-onnx" and not any("image-" in word for word in arguments)
    out = case.path.with_name("next.npz")
    _, warned = said(capsys, *arguments, "-o", out)
    assert not warned and len(np.load(out)["y_ood"]) == 120
    assert np.load(out)["y_ood"].mean() <= 0.05
    # other images of the same kind: 5% of 400, and three standard deviations of that
    more = write_images(case.path.with_name("more"), 400, 7)
    assert (
        0
        < ran(capsys, case, more)[0]["y_ood"].mean()
        <= 0.05 + 3 * (0.05 * 0.95 / 120 + 0.05 * 0.95 / 400) ** 0.5
    )


def test_digits_flag_few_of_their_own_images(tmp_path, capsys):
    """As it was found: all of 1,200 images were flagged by the command that the conversion printed."""
    with np.load(MODELS / "digits_cnn_calibration.npz") as file:
        images = file["image"]
    for part, rows in (("calib", images[:400]), ("rest", images[400:800])):
        (tmp_path / part).mkdir()
        for number, image in enumerate(rows):
            Image.fromarray((image[0] * 255).round().astype(np.uint8)).save(
                tmp_path / part / f"{number:04}.png"
            )
    out = tmp_path / "a.onnx"
    options = ["--image-mean", ".5", "--image-std", ".25", "--m", "200", "--k", "20"]
    said(capsys, "convert", MODELS / "digits_cnn.onnx", "--calib", tmp_path / "calib", "-o", out, *options)
    flagged = {}
    for part in ("calib", "rest"):
        _, warned = said(capsys, "run", out, "--data", tmp_path / part, "-o", tmp_path / "a.npz")
        flagged[part] = np.load(tmp_path / "a.npz")["logits_ood"].mean()
        assert not warned
    assert flagged["calib"] <= 0.06 and 0.01 <= flagged["rest"] <= 0.12


def test_run_reads_images_as_the_file_says(case, capsys):
    found, warned = ran(capsys, case, case.data)
    assert not warned
    assert_same(found, answers(case.path, by_hand(case.data)))
    given = ("--image-mean", "0.5,0.4,0.3", "--image-std", "0.25,0.2,0.3", "--image-size", "8,6")
    again, warned = ran(capsys, case, case.data, *given, "--image-colors", "bgr", "--image-layout", "first")
    assert not warned and all((again[name] == found[name]).all() for name in found)


@pytest.mark.parametrize(
    "options, expected, told",
    [
        (["--image-std", "0.5"], {"std": (0.5,)}, "--image-std 0.5, but the file was calibrated with --image-std 0.25,0.2,0.3"),
        (["--image-size", "9"], {"size": (9, 9)}, "--image-size 9,9, but the file was calibrated with --image-size 8,6"),
        (["--image-mean", "0", "--image-std", "1"], {"mean": (0,), "std": (1,)}, "--image-mean 0.0 and --image-std 1.0, but"),
    ],
)  # fmt: skip
def test_what_differs_is_used_and_warned_of(case, capsys, options, expected, told):
    found, warned = ran(capsys, case, case.data, *options)
    assert_same(found, answers(case.path, by_hand(case.data, **expected)))
    (line,) = warned
    assert line.startswith(f"warning: these images are read with {told}") and line.endswith(
        ": scores will differ"
    )


def test_data_that_are_no_images_are_not_touched(case, capsys, tmp_path):
    x = np.random.default_rng(3).normal(size=(9, 3, 5, 7)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    for options in ((), ("--image-mean", "0.1", "--image-size", "4")):
        found, warned = ran(capsys, case, tmp_path / "x.npz", *options)
        assert not warned
        np.testing.assert_array_equal(found["y"], answers(case.path, x)["y"])


def test_images_for_a_file_that_was_calibrated_without(tmp_path, capsys):
    """Nothing is said in it, so that options are taken as they are, and there is nothing to warn of."""
    x = np.random.default_rng(0).normal(size=(60, 3, 10, 11)).astype(np.float32)
    path = tmp_path / "a.onnx"
    gapa_onnx.convert(coloured_model(), {"x": x}, path, **SMALL)
    data = write_images(tmp_path / "data", 8, 1)
    options = ("--image-mean", "0.5,0.4,0.3", "--image-std", "0.25,0.2,0.3", "--image-size", "8,6")
    _, warned = said(
        capsys, "run", path, "--data", data, *options, "--image-colors", "bgr", "-o", tmp_path / "y.npz"
    )
    assert not warned
    assert_same(dict(np.load(tmp_path / "y.npz")), answers(path, by_hand(data)))


def test_verify_and_bench_take_the_options_of_the_converted_file(case, capsys, monkeypatch):
    fed = []
    check, measure = verify.verify, bench.measure_on
    monkeypatch.setattr(
        verify, "verify", lambda s, c, batches, **o: fed.extend(batches) or check(s, c, batches, **o)
    )
    monkeypatch.setattr(
        bench,
        "measure_on",
        lambda s, c, feeds, **o: fed.append(feeds) or measure(s, c, feeds, **{**o, "parts": False}),
    )
    expected, other = by_hand(case.data), by_hand(case.data, std=(0.5,))
    pair = (case.source, case.path, "--data", case.data)
    for command in (("verify", *pair), ("bench", *pair, "--batch-size", "16", "--rounds", "1")):
        for options, wanted, warnings_told in (((), expected, 0), (("--image-std", "0.5"), other, 1)):
            fed.clear()
            capsys.readouterr()
            main([str(word) for word in (*command, *options)])  # a busy machine refuses the figure of a bench
            told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
            assert len(told) == warnings_told
            got = np.concatenate([batch["x"] for batch in fed])
            np.testing.assert_allclose(got, wanted[: len(got)], atol=1e-5)


def test_threshold_on_images(case, capsys, tmp_path):
    np.savez(tmp_path / "x.npz", x=by_hand(case.data))
    found = {}
    for name, data in (("images", case.data), ("rows", tmp_path / "x.npz")):
        move = (
            "threshold",
            case.path,
            "--quantile",
            "0.9",
            "--data",
            data,
            "-o",
            tmp_path / f"{name}.onnx",
            "--json",
        )
        text, warned = said(capsys, *move)
        assert not warned
        found[name] = json.loads(text)["y"]["threshold"]
        assert read(onnx.load(tmp_path / f"{name}.onnx")).images == RECORD
    assert found["images"] == pytest.approx(found["rows"], rel=1e-3)
    with pytest.warns(
        DataWarning, match=r"with `ImageOptions\(mean=0.1\)`, but .*`ImageOptions\(mean=\(0.5, 0.4, 0.3\)\)`"
    ):
        (moved,) = gapa_onnx.set_threshold(
            case.path, quantile=0.9, data=case.data, out=tmp_path / "b.onnx", images=ImageOptions(mean=(0.1,))
        )
    assert moved.threshold != pytest.approx(found["rows"], rel=1e-3)


def test_evaluate_reads_all_its_sets_so(case, capsys):
    pytest.importorskip("sklearn")
    rows, dark = {"x": by_hand(case.data)}, {"x": by_hand(case.dark)}
    expected = gapa_onnx.evaluate(case.path, rows, case.labels, ood=dark)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        found = gapa_onnx.evaluate(
            case.path, case.data, case.labels, ood=case.dark, shifts=case.dark.parent, images=None
        )
    assert expected.scores and found.scores.keys() == expected.scores.keys()
    for name, sets in expected.scores.items():
        for got, wanted in zip(found.scores[name], sets, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)
    assert found.metrics["gapa"]["nll"] == pytest.approx(expected.metrics["gapa"]["nll"], rel=1e-3)
    assert found.flagged == expected.flagged
    darker = gapa_onnx.evaluate(case.path, dark, case.labels)
    assert found.shifts[0].metrics["gapa"]["nll"] == pytest.approx(darker.metrics["gapa"]["nll"], rel=1e-3)
    one = found.most_certain[0]  # what is shown is the picture again, resized, red first
    path = sorted(case.data.glob("*.png"))[one.row]
    shown = np.asarray(Image.open(path).resize(SIZE[::-1], Image.BILINEAR))
    np.testing.assert_allclose(one.image, shown, atol=1)
    arguments = ("evaluate", case.path, "--data", case.data, "--labels", case.labels, "--ood", case.dark)
    text, warned = said(capsys, *arguments, "--json")
    assert not warned
    _, warned = said(capsys, *arguments, "--json", "--image-mean", "0.1")
    assert len(warned) == 1  # of two sets


# ------------------------------------------------------------------------------ the options


def test_sizes_where_the_model_leaves_them_open(tmp_path):
    folder = write_images(tmp_path / "a", 5, 0)
    inputs = (InputSpec("x", np.float32, ("n", 3, "h", "w")),)
    options = ImageOptions((0.5,), (0.25,), (8, 6), colors="bgr")
    data = open_data(folder, inputs, Preparation(options))
    (batch,) = data.batches()
    np.testing.assert_allclose(batch["x"], by_hand(folder, (0.5,), (0.25,)), atol=1e-5)
    assert data.images == ImageRecord(8, 6, "first", "bgr", 1, (0.5,), (0.25,))
    as_they_are = open_data(folder, inputs)
    assert as_they_are.images == ImageRecord(None, None, "first", "rgb", 1, (0.0,), (1.0,))
    sizes = {batch["x"].shape[2:] for batch in as_they_are.batches()}
    assert sizes == {Image.open(path).size[::-1] for path in folder.iterdir()}
    assert len(sizes) > 1
    with pytest.raises(UserError, match="so images cannot be 8 × 6"):
        open_data(folder, (InputSpec("x", np.float32, ("n", 3, 9, "w")),), Preparation(options))


def test_a_layout_that_the_shape_does_not_tell(tmp_path):
    folder = write_images(tmp_path / "a", 3, 0)
    for shape in (("n", "c", "h", "w"), None):
        inputs = (InputSpec("x", np.float32, shape),)
        with pytest.raises(UserError, match="images do not fit") as caught:
            open_data(folder, inputs)
        assert "`ImageOptions(layout='first')`" in caught.value.hint
        (first,) = open_data(folder, inputs, Preparation(ImageOptions(layout="first", size=(4, 5)))).batches()
        (last,) = open_data(folder, inputs, Preparation(ImageOptions(layout="last", size=(4, 5)))).batches()
        (grey,) = open_data(
            folder, inputs, Preparation(ImageOptions(layout="last", colors="grey", size=(4, 5)))
        ).batches()
        assert first["x"].shape == (3, 3, 4, 5) and grey["x"].shape == (3, 4, 5, 1)
        np.testing.assert_array_equal(last["x"], first["x"].transpose(0, 2, 3, 1))
    with pytest.raises(UserError, match="1 or 3 channels last"):
        open_data(
            folder, (InputSpec("x", np.float32, ("n", 3, 8, 8)),), Preparation(ImageOptions(layout="last"))
        )


@pytest.mark.parametrize(
    "options, told",
    [
        (["--image-layout", "middle"], "error: --image-layout middle is not known"),
        (["--image-colors", "red"], "error: --image-colors red is not known"),
        (["--image-colors", "grey"], "so images cannot be grey"),
        (["--image-size", "8x6"], "error: --image-size '8x6' is not a height and a width"),
        (["--image-size", "0"], "error: --image-size '0' is not a height and a width"),
        (["--image-size", "1,2,3"], "error: --image-size '1,2,3' is not a height and a width"),
    ],
)
def test_options_that_are_refused(case, capsys, options, told):
    capsys.readouterr()
    assert main(["run", str(case.path), "--data", str(case.data), *options]) == 2
    error = capsys.readouterr().err
    assert told in error and "hint: " in error


def test_options_are_checked_in_python_too():
    for wrong in ({"layout": "NCHW"}, {"colors": "BGR"}, {"size": (0, 8)}, {"size": (8,)}):
        with pytest.raises(UserError):
            ImageOptions(**wrong)
