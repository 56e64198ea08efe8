"""Shards read by workers of Ray against one pass: the same file, byte for byte, also where a worker dies."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.data.bundle import Bundle, Reader, bundle_of
from gapa_onnx.errors import UserError

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'gapa-onnx[ray]'")
from gapa_onnx import ray as by_ray  # noqa: E402

pytestmark = pytest.mark.nightly
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

NET = """<ir_version: 8, opset_import: ["": 17]>
net (float[N, 20] x) => (float[N, 4] logits) { z = MatMul(x, w1)  h = Relu(z)  logits = MatMul(h, w2) }"""
SMALL = {"m": 40, "k": 8, "batch_size": 64}


def net() -> onnx.ModelProto:
    generator, model = np.random.default_rng(0), onnx.parser.parse_model(NET)
    for name, shape in (("w1", (20, 32)), ("w2", (32, 4))):
        array = generator.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


ROWS = np.random.default_rng(1).normal(size=(1000, 20)).astype(np.float32)


class DeadlyOnce:
    """Data whose first reader in another process says who it is, and waits to be killed."""

    def __init__(self, told: Path):
        self.told, self.at_home = told, os.getpid()

    def __call__(self) -> Iterator[Bundle]:
        if os.getpid() != self.at_home:
            try:
                with open(self.told, "x") as file:
                    file.write(str(os.getpid()))
                time.sleep(120)
            except FileExistsError:
                pass
        yield bundle_of({"x": ROWS}, "rows")


def kill_when_told(told: Path, killed: list[int]) -> None:
    while not (told.exists() and told.read_text()):
        time.sleep(0.05)
    killed.append(int(told.read_text()))
    os.kill(killed[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def expected() -> bytes:
    return gapa_onnx.convert(net(), {"x": ROWS}, **SMALL).model.SerializeToString(deterministic=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_make_the_same_file(cluster, expected, workers):
    told = []
    found = by_ray.convert(
        net(), {"x": ROWS}, workers=workers, progress=lambda text, done: told.append((text, done)), **SMALL
    )
    assert found.model.SerializeToString(deterministic=True) == expected
    reading = [done for text, done in told if text == "reading calibration data"]
    assert reading == sorted(reading) and len(reading) == 4 * workers and reading[-1] == 1


def test_a_worker_that_dies_loses_nothing(cluster, expected, tmp_path):
    told, killed = tmp_path / "pid", []
    killer = threading.Thread(target=kill_when_told, args=(told, killed), daemon=True)
    killer.start()
    data = Reader("rows", DeadlyOnce(told), count=lambda: len(ROWS))
    found = by_ray.convert(net(), data, workers=2, **SMALL)
    killer.join(60)
    assert len(killed) == 1 and killed[0] != os.getpid()
    assert found.model.SerializeToString(deterministic=True) == expected


def test_a_dataset_of_ray_keeps_its_order(cluster, expected, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray.data

    for number, rows in enumerate(np.array_split(ROWS, 7)):
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 20)
        pq.write_table(pa.table({"x": column}), tmp_path / f"{number}.parquet")
    dataset = ray.data.read_parquet(str(tmp_path))
    found = by_ray.convert(net(), dataset, workers=2, **SMALL)
    assert found.model.SerializeToString(deterministic=True) == expected


def test_what_is_the_users_to_fix_is_told_once(cluster):
    with pytest.raises(UserError, match="20"):
        by_ray.convert(net(), {"x": ROWS[:, :7]}, workers=2, **SMALL)
    with pytest.raises(UserError, match="give at least 1"):
        by_ray.convert(net(), {"x": ROWS}, workers=0, **SMALL)


def test_the_command_line(cluster, expected, tmp_path, capsys):
    model, data, out = tmp_path / "net.onnx", tmp_path / "x.npy", tmp_path / "out.onnx"
    onnx.save(net(), model)
    np.save(data, ROWS)
    options = ["--m", "40", "--k", "8", "--batch-size", "64"]
    arguments = ["convert", str(model), "--calib", str(data), "-o", str(out), *options]
    assert main([*arguments, "--engine", "ray", "--workers", "2"]) == 0
    alone = gapa_onnx.convert(model, data, tmp_path / "alone.onnx", **SMALL)
    assert out.read_bytes() == alone.path.read_bytes()
    assert main([*arguments, "--workers", "2"]) == 2
    assert main([*arguments, "--engine", "ray", "--budget", "2"]) == 2
    assert main([*arguments, "--engine", "spark"]) == 2
    assert "choose local or ray" in capsys.readouterr().err
