"""`private`: a file keeps means of several calibration rows, and says of how many at least."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.errors import UserError
from gapa_onnx.fit.inducing import cluster_sizes, of_many, select
from gapa_onnx.record import read

SOURCE, CALIB = MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz"
RNG = np.random.default_rng(4)


def test_points_of_few_rows_are_left_out():
    rows = np.concatenate([RNG.normal(size=(40, 2)), [[50, 50]], [[-60, 0], [-60, 0.1]]]).astype(np.float32)
    points = select("kmeans", rows, 6)
    assert cluster_sizes(rows, points).min() <= 2
    kept = of_many(rows, points, 3)
    assert 0 < len(kept) < len(points) and np.abs(kept).max() < 10
    assert {tuple(point) for point in kept} <= {tuple(point) for point in points}
    assert of_many(rows, points, 1) is points


def places(model: onnx.ModelProto) -> list[int]:
    record = read(model)
    assert record is not None
    return [place.least_rows for place in record.places]


def test_the_file_says_how_many_rows_are_behind_a_point():
    convert = {"model": SOURCE, "calib": CALIB, "m": 60, "k": 10}
    assert all(least >= 1 for least in places(gapa_onnx.convert(**convert).model))
    assert places(gapa_onnx.convert(**convert, inducing="random").model) == [1, 1]
    private = gapa_onnx.convert(**convert, private=5)
    assert places(private.model) == [5, 5] and all(check.passed for check in private.checks)
    rows = np.load(CALIB)["pixels"]
    assert len(rows) > 60
    with pytest.raises(UserError, match="means of 5000 rows or more"):
        gapa_onnx.convert(**convert, private=5000)
    with pytest.raises(UserError, match="keeps calibration rows themselves"):
        gapa_onnx.convert(**convert, private=5, inducing="all")


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        (["--inducing", "random"], "keeps up to 120 rows of your data, as activations"),
        (["--private", "4"], "no row of your data; each of its points is the mean of 4 rows or more"),
    ],
)
def test_inspect_says_what_of_the_data_is_inside(capsys, tmp_path, choices, said):
    out = tmp_path / "out.onnx"
    assert (
        main(
            ["convert", str(SOURCE), "--calib", str(CALIB), "-o", str(out), "--m", "60", "--k", "5", *choices]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
