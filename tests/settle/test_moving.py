"""Levels that are moved: the file answers as one that was converted with them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.labelled_models import SMALL, converted, net, rows, run
from support.small_models import noisy_data, noisy_net

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.compiler import convert
from gapa_onnx.errors import UserError
from gapa_onnx.record import read
from gapa_onnx.settle.moving import move_promises, promises


def answers(path: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    return run(onnx.load(path), x)


@pytest.mark.parametrize("per_class", ["no", "yes"])
def test_a_moved_coverage_is_that_of_a_conversion(tmp_path, per_class):
    path, x = tmp_path / "y.onnx", rows(200, 3)[0]
    onnx.save(converted(1000, coverage=0.8, per_class=per_class), path)
    other = converted(1000, coverage=0.6, per_class=per_class)
    (found,) = move_promises(path, coverage=0.6, out=tmp_path / "moved.onnx")
    assert found.promise.level == 0.6
    moved, asked = answers(tmp_path / "moved.onnx", x), run(other, x)
    for name, array in asked.items():
        np.testing.assert_array_equal(moved[name], array, err_msg=name)
    assert not np.array_equal(answers(path, x)["y_set"], asked["y_set"])
    assert read(onnx.load(path)).heads["y"].sets.level == 0.8


def test_between_two_levels_the_safer_one_is_taken(tmp_path):
    path = tmp_path / "y.onnx"
    onnx.save(converted(3000, max_error=0.4), path)
    found = {entry.name: entry.promise for entry in move_promises(path, coverage=0.855, max_error=0.39)}
    assert found["sets"].level == 0.86 and found["deferral"].level == 0.3
    assert {entry.name: entry.promise for entry in promises(path)} == found
    line = np.float32(found["deferral"].table["0.3"][0])
    answered = answers(path, rows(300, 4)[0])
    np.testing.assert_array_equal(answered["y_defer"], answered["y_probs"].max(axis=1) < line)


def test_intervals_are_moved(tmp_path):
    more, y = noisy_data(300, 2)
    path = tmp_path / "y.onnx"
    convert(noisy_net(), {"x": noisy_data(200, 1)[0]}, path, targets=y, held_out={"x": more}, **SMALL)
    before = answers(path, more)
    move_promises(path, coverage=0.5)
    after = answers(path, more)
    assert ((after["y_upper"] - after["y_lower"]) < (before["y_upper"] - before["y_lower"])).all()


@pytest.mark.parametrize(
    "levels, message",
    [
        ({"coverage": 0.9999}, "reach a coverage of 0.99, not 0.9999"),
        ({"coverage": 1.5}, "must be between 0 and 1"),
        ({"max_error": 0.1}, "the file defers nothing"),
    ],
)
def test_levels_that_cannot_be(tmp_path, levels, message):
    path = tmp_path / "y.onnx"
    onnx.save(converted(500), path)
    before = path.read_bytes()
    with pytest.raises(UserError, match=message):
        move_promises(path, **levels)
    assert path.read_bytes() == before


def test_a_file_without_promises(tmp_path):
    path = tmp_path / "y.onnx"
    convert(net(), {"x": rows(100, 1)[0]}, path, task="classification", **SMALL)
    assert promises(path) == ()
    with pytest.raises(UserError, match="no sets and no intervals"):
        move_promises(path, coverage=0.8)


# ------------------------------------------------------------------------ the command line


@pytest.fixture
def files(tmp_path) -> Path:
    """The model, rows and labels as files."""
    onnx.save(net(), tmp_path / "net.onnx")
    for name, (x, y) in {"calib": rows(300, 1), "held": rows(500, 2), "test": rows(400, 3)}.items():
        np.save(tmp_path / f"{name}.npy", x)
        np.save(tmp_path / f"{name}_y.npy", y)
    return tmp_path


def call(folder: Path, words: str) -> int:
    places = [str(folder / word) if word.endswith((".onnx", ".npy")) else word for word in words.split()]
    return main(places)


CONVERT = "convert net.onnx --calib calib.npy --task classification --m 60 --k 10 -o out.onnx"


def test_from_labels_to_an_evaluation(files, capsys):
    assert call(files, f"{CONVERT} --held-out held.npy --labels held_y.npy --max-error .5 --coverage .8") == 0
    out = capsys.readouterr().out
    assert "250 for fitting, 250 for nothing but counting" in out
    assert "the true class is in the set of at least 0.8 of all rows: exactly" in out
    assert call(files, "threshold out.onnx --coverage .85 --max-error .4") == 0
    assert "at most 0.4 of the answered rows are wrong, with confidence 0.9" in capsys.readouterr().out
    assert call(files, "evaluate out.onnx --data test.npy --labels test_y.npy --json") == 0
    found = json.loads(capsys.readouterr().out)["promises"]
    answered = answers(files / "out.onnx", np.load(files / "test.npy"))
    y = np.load(files / "test_y.npy")
    inside = answered["y_set"][np.arange(400), y]
    assert found["sets"]["all"] == {
        "promised": 0.85, "rows": 400, "coverage": pytest.approx(inside.mean()),
        "set_size": pytest.approx(answered["y_set"].sum(axis=1).mean()),
    }  # fmt: skip
    for label in range(5):
        assert found["sets"][f"class {label}"]["coverage"] == pytest.approx(inside[y == label].mean())
    order = np.argsort(answered["y_score"], kind="stable")
    strangest = inside[order[-133:]].mean()
    assert found["sets"]["strangest third"]["coverage"] == pytest.approx(strangest)
    right = ~answered["y_defer"]
    wrong = (answered["y"].argmax(axis=1) != y)[right].mean()
    assert found["deferral"]["all"]["error"] == pytest.approx(wrong)
    assert found["deferral"]["all"]["answered"] == pytest.approx(right.mean())
    assert call(files, "evaluate out.onnx --data test.npy --labels test_y.npy --ood calib.npy") == 0
    assert "sets: how often the true class is inside" in capsys.readouterr().out


def test_the_report_shows_promises(files, capsys):
    assert call(files, f"{CONVERT} --held-out held.npy --labels held_y.npy") == 0
    found = gapa_onnx.evaluate(
        files / "out.onnx", files / "test.npy", files / "test_y.npy", ood=str(files / "calib.npy")
    )
    gapa_onnx.write_report(found, files / "report.html")
    page = (files / "report.html").read_text(encoding="utf-8")
    assert "Sets of classes: at least 90%" in page and "strangest third" in page and "OOD rows" in page


def test_intervals_in_an_evaluation(tmp_path):
    more, y = noisy_data(300, 2)
    path, (x, true) = tmp_path / "y.onnx", noisy_data(250, 5)
    convert(noisy_net(), {"x": noisy_data(200, 1)[0]}, path, targets=y, held_out={"x": more}, **SMALL)
    found = gapa_onnx.evaluate(path, {"x": x}, true).promises["intervals"]
    answered = answers(path, x)
    inside = (answered["y_lower"] <= true) & (true <= answered["y_upper"])
    assert found["all"]["coverage"] == pytest.approx(inside.mean())
    assert found["all"]["width"] == pytest.approx(
        (answered["y_upper"] - answered["y_lower"]).mean(), rel=1e-5
    )
    assert sum(found[name]["rows"] for name in found if name.endswith("third")) == 250


BAD = [
    ("--held-out calib.npy --labels calib_y.npy", "300 of 300 held-out rows are calibration rows too"),
    ("--held-out held.npy --labels calib_y.npy", "300 labels for 500 held-out rows"),
    ("--labels held_y.npy", "500 labels for 300 calibration rows"),
    ("--held-out held.npy --labels held_y.npy --coverage .999", "coverage 0.999 of 'y' needs 999 rows"),
    ("--held-out held.npy --labels held_y.npy --coverage 1", "--coverage is 1"),
    ("--held-out held.npy --labels held_y.npy --max-error .0001", "needs 23025 rows to count on"),
    ("--held-out held.npy --targets held_y.npy", "targets are for regression"),
    ("--max-error .1", "--max-error 0.1 is counted on labels"),
    ("--labels held_y.npy --sets saps", "choose one of lac, aps, raps"),
]


@pytest.mark.parametrize("options, message", BAD)
def test_bad_input_is_one_sentence(files, capsys, options, message):
    assert call(files, f"{CONVERT} {options}") == 2
    said = capsys.readouterr().err
    assert message in said and "hint: " in said and "Traceback" not in said
    assert not (files / "out.onnx").exists()


def test_a_rehearsal_reads_the_truth(files, capsys):
    assert call(files, f"{CONVERT} --held-out held.npy --labels calib_y.npy --dry-run") == 2
    assert "300 labels for 500 held-out rows" in capsys.readouterr().err
    assert call(files, f"{CONVERT} --held-out held.npy --labels held_y.npy --dry-run") == 0
