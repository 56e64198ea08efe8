"""Data in every accepted form give the rows that numpy gives; everything else is refused with a sentence."""

from __future__ import annotations

import io
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from onnx import numpy_helper

from gapa_onnx.data import ImageOptions, InputSpec, Preparation, open_data
from gapa_onnx.errors import UserError

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
X = InputSpec("x", F32, ("N", 4))
TWO = (X, InputSpec("ids", I64, ("N",)))
RATE = (X, InputSpec("sr", I64, ()))
IMAGE = InputSpec("image", F32, (None, 3, 8, 6))
TEXT = InputSpec("words", np.dtype(object), ("N", 1))


def rows_of(n: int, *trailing: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, *(trailing or (4,)))).astype(np.float32)


def joined(source, inputs, batch_size: int = 256, **options) -> dict[str, np.ndarray]:
    """All batches, concatenated, each one checked for what `batches` promises."""
    batches = list(open_data(source, inputs, **options).batches(batch_size))
    for batch in batches:
        for spec in inputs:
            array = batch[spec.name]
            assert array.dtype == spec.dtype and array.flags.c_contiguous
            assert spec.shape is None or array.ndim == len(spec.shape)
    return {s.name: np.concatenate([np.atleast_1d(batch[s.name]) for batch in batches]) for s in inputs}


def refusal(source, inputs, **options) -> str:
    with pytest.raises(UserError) as caught:
        list(open_data(source, inputs, **options).batches())
    assert caught.value.hint
    return str(caught.value)


def write_tensor(path: Path, array: np.ndarray, name: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(numpy_helper.from_array(array, name).SerializeToString())


# One writer per format: the same rows (23, 4), and for `ids` the row numbers, come back from each.


def write_npy(folder):
    np.save(folder / "a.npy", rows_of(23))
    return folder / "a.npy"


def write_npy_fortran(folder):
    np.save(folder / "a.npy", np.asfortranarray(rows_of(23)))
    return str(folder / "a.npy")


def write_npy_big_endian(folder):
    np.save(folder / "a.npy", rows_of(23).astype(">f4"))
    return folder / "a.npy"


def write_npz(folder):
    np.savez(folder / "a.npz", x=rows_of(23), ids=np.arange(23))
    return folder / "a.npz"


def write_npz_compressed_fortran(folder):
    np.savez_compressed(folder / "a.npz", x=np.asfortranarray(rows_of(23)), ids=np.arange(23, dtype=np.int32))
    return folder / "a.npz"


def write_folder_npy_stacks(folder):
    for k, part in enumerate(np.split(rows_of(23), [5, 6, 20])):
        np.save(folder / f"part{k}.npy", part)
    return folder


def write_folder_npy_samples(folder):
    for k, row in enumerate(rows_of(23)):
        np.save(folder / f"{k:03}.npy", row)
    return folder


def write_folder_npy_numbered(folder):
    parts = zip(np.split(rows_of(23), [5, 6]), np.split(np.arange(23), [5, 6]))
    for k, (x, ids) in enumerate(parts):
        np.save(folder / f"x_{k + 9}.npy", x)  # 9, 10, 11: the order is that of numbers, not of letters
        np.save(folder / f"ids-{k + 9}.npy", ids)
    return folder


def write_folder_npz(folder):
    for k, rows in enumerate((slice(0, 7), slice(7, 23))):
        np.savez(folder / f"{k}.npz", x=rows_of(23)[rows], ids=np.arange(23)[rows])
    (folder / ".hidden.npz").write_bytes(b"junk")
    (folder / "notes.txt").write_text("unknown extensions are ignored")
    return folder


def write_test_data_sets(folder):
    for k, rows in enumerate((slice(0, 7), slice(7, 23))):
        write_tensor(folder / f"test_data_set_{k}" / "input_0.pb", rows_of(23)[rows], "x")
        write_tensor(folder / f"test_data_set_{k}" / "input_1.pb", np.arange(23)[rows], "ids")
        write_tensor(folder / f"test_data_set_{k}" / "output_0.pb", np.zeros((3, 3)), "y")
    return folder


def write_test_data_sets_nameless(folder):
    write_tensor(folder / "test_data_set_0" / "input_0.pb", rows_of(23))
    write_tensor(folder / "test_data_set_0" / "input_1.pb", np.arange(23))
    return folder


def write_pb(folder):
    write_tensor(folder / "input_0.pb", rows_of(23))
    return folder / "input_0.pb"


def write_pb_samples(folder):
    for k in range(12):
        write_tensor(folder / f"input_{k}.pb", rows_of(23)[2 * k : 2 * k + 2])
    return folder


def csv_lines(separator=","):
    return [separator.join(f"{value:.9g}" for value in row) for row in rows_of(23)]


def write_csv(folder):
    (folder / "a.csv").write_text("\n".join(csv_lines()) + "\n")
    return folder / "a.csv"


def write_csv_header(folder):
    text = "\r\n".join(["\ufeffa;b;c;d", *csv_lines(";"), "", ""])
    (folder / "a.csv").write_text(text, encoding="utf-8", newline="")
    return folder / "a.csv"


def write_csv_pandas(folder):
    lines = [f"{k},{line},cat" for k, line in enumerate(csv_lines())]
    (folder / "a.csv").write_text("\n".join([",0,1,2,3,species", *lines]))
    return folder / "a.csv"


def write_parquet(folder):
    pa = pytest.importorskip("pyarrow")
    columns = {"ids": pa.array(np.arange(23)), "x": pa.array(rows_of(23).tolist(), pa.list_(pa.float32(), 4))}
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=10)
    return folder / "a.parquet"


def write_parquet_columns(folder):
    pa = pytest.importorskip("pyarrow")
    columns = {f"c{k}": rows_of(23)[:, k] for k in range(4)} | {"species": ["cat"] * 23}
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), folder / "a.parquet")
    return folder / "a.parquet"


def write_parquet_variable_list(folder):
    pa = pytest.importorskip("pyarrow")
    columns = {"label": np.arange(23), "embedding": pa.array(rows_of(23).tolist(), pa.list_(pa.float32()))}
    pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), folder / "a.parquet")
    return folder / "a.parquet"


def write_loader(folder):
    np.save(folder / "rows", rows_of(23))
    (folder / "load.py").write_text(
        "import numpy as np, pathlib\n"
        "def batches():\n"
        "    rows = np.load(pathlib.Path(__file__).with_name('rows.npy'))\n"
        "    for start in range(0, 23, 5):\n"
        "        yield {'x': rows[start:start + 5], 'ids': list(range(23))[start:start + 5]}\n"
    )
    return f"{folder / 'load.py'}:batches"


class Reader:
    """Like an onnxruntime CalibrationDataReader."""

    def __init__(self):
        x, ids = rows_of(23), np.arange(23)
        self.items = iter([{"x": x[k : k + 6], "ids": ids[k : k + 6]} for k in range(0, 23, 6)])

    def get_next(self):
        return next(self.items, None)


class RewindingReader(Reader):
    def rewind(self):
        self.__init__()


def in_dict(folder):
    return {"x": rows_of(23).astype(np.float64), "ids": np.arange(23, dtype=np.int32), "labels": np.zeros(99)}


def in_list(folder):
    return [{"x": rows_of(23)[:3], "ids": [0, 1, 2]}, {"x": rows_of(23)[3:], "ids": np.arange(3.0, 23)}]


def in_generator(folder):
    return (item for item in in_list(folder))


def in_function(folder):
    return lambda: in_generator(folder)


ONE_INPUT = [
    write_npy, write_npy_fortran, write_npy_big_endian, write_folder_npy_stacks, write_folder_npy_samples,
    write_pb, write_pb_samples, write_csv, write_csv_header, write_csv_pandas, write_parquet_columns,
    write_parquet_variable_list,
]  # fmt: skip
TWO_INPUTS = [
    write_npz, write_npz_compressed_fortran, write_folder_npy_numbered, write_folder_npz,
    write_test_data_sets, write_test_data_sets_nameless, write_parquet, write_loader,
    in_dict, in_list, in_generator, in_function,
    lambda folder: Reader(), lambda folder: RewindingReader(),
]  # fmt: skip
UNCOUNTED = ("write_loader", "in_list", "in_generator", "in_function", "<lambda>")


@pytest.mark.parametrize(
    "write, inputs", [(w, (X,)) for w in ONE_INPUT] + [(w, i) for w in TWO_INPUTS for i in (TWO, (X,))]
)
def test_every_form_gives_the_same_rows_at_every_batch_size_again_and_again(write, inputs, tmp_path):
    data = open_data(write(tmp_path), inputs)
    assert data.description
    assert data.rows == (None if write.__name__ in UNCOUNTED else 23)
    next(data.batches(2))  # a pass that is left half way must not disturb the next
    for batch_size in (1, 7, 256, 7):
        batches = list(data.batches(batch_size))
        assert [len(batch["x"]) for batch in batches] == [batch_size] * (23 // batch_size) + [
            rest for rest in [23 % batch_size] if rest
        ]
        assert all(batch.keys() == {spec.name for spec in inputs} for batch in batches)
        arrays = [(batch[spec.name], spec) for batch in batches for spec in inputs]
        assert all(array.dtype == spec.dtype and array.flags.c_contiguous for array, spec in arrays)
        np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in batches]), rows_of(23))
        if len(inputs) > 1:
            np.testing.assert_array_equal(np.concatenate([batch["ids"] for batch in batches]), np.arange(23))


def test_descriptions(tmp_path):
    assert open_data(write_folder_npy_samples(tmp_path), (X,)).description == "folder of 23 .npy files"
    assert open_data(in_dict(None), TWO).description == "arrays in memory"


# The batch axis


@pytest.mark.parametrize(
    "shape, given, sizes",
    [
        ((1, 4), (5, 4), [1] * 5),
        ((1, 4), (4,), [1]),
        ((3, 4), (8, 4), [3, 3]),  # the remainder is dropped
        ((25, 5), (25, 5), [25]),
        ((25, 5), (50, 5), [25, 25]),
        (("N", 4), (4,), [1]),
        (("N",), (), [1]),
        ((None, None, 2), (7, 3, 2), [4, 3]),
        (None, (9, 3, 2), [4, 4, 1]),
        ((-1, 4), (6, 4), [4, 2]),
    ],
)
def test_rows_are_cut_as_the_first_dimension_asks(shape, given, sizes):
    array = rows_of(1, *given)[0] if given else np.float32(2.5)
    batches = list(open_data({"x": array}, (InputSpec("x", F32, shape),)).batches(4))
    assert [len(batch["x"]) for batch in batches] == sizes
    kept = np.concatenate([batch["x"] for batch in batches])
    expected = np.asarray(array).reshape(-1, *kept.shape[1:])[: len(kept)]
    np.testing.assert_array_equal(kept, expected)


def test_single_samples_in_files_fill_a_fixed_batch(tmp_path):
    data = open_data(write_folder_npy_samples(tmp_path), (InputSpec("x", F32, (5, 4)),))
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in data.batches()]), rows_of(23)[:20])


@pytest.mark.parametrize(
    "shape, value",
    [((), np.int64(16000)), ((1,), np.array([16000])), ((1,), 16000), ((2, 3), np.arange(6).reshape(2, 3))],
)
def test_inputs_outside_the_batch_go_along_with_every_batch(shape, value):
    for x_shape in (("N", 4), (1, 4)):
        inputs = (InputSpec("x", F32, x_shape), InputSpec("sr", I64, shape))
        batches = list(open_data({"x": rows_of(9), "sr": value}, inputs).batches(4))
        assert len(batches) == (3 if x_shape[0] == "N" else 9)
        for batch in batches:
            assert batch["sr"].shape == shape
            np.testing.assert_array_equal(batch["sr"], np.reshape(value, shape))


def test_an_input_of_shape_1_may_also_have_one_value_per_row():
    inputs = (InputSpec("x", F32, ("N", 4)), InputSpec("sr", I64, (1,)))
    batches = list(open_data({"x": rows_of(5), "sr": np.arange(5)}, inputs).batches(4))
    assert [batch["sr"].tolist() for batch in batches] == [[k] for k in range(5)]
    assert all(batch["x"].shape == (1, 4) for batch in batches)


def test_a_state_fixes_the_batch_that_it_was_made_for():
    inputs = (InputSpec("x", F32, ("N", 4)), InputSpec("state", F32, (2, "N", 3)))
    batches = list(open_data({"x": rows_of(6), "state": rows_of(2, 3, 3)}, inputs).batches(256))
    assert [batch["x"].shape[0] for batch in batches] == [3, 3]
    assert all(batch["state"].shape == (2, 3, 3) for batch in batches)


def test_a_change_of_constants_or_of_trailing_sizes_starts_a_new_batch():
    items = [{"x": rows_of(2), "sr": 8}, {"x": rows_of(3), "sr": 8}, {"x": rows_of(2), "sr": 16}]
    got = [(len(batch["x"]), int(batch["sr"])) for batch in open_data(items, RATE).batches()]
    assert got == [(5, 8), (2, 16)]
    items = [{"x": rows_of(2, 4)}, {"x": rows_of(1, 4)}, {"x": rows_of(2, 6)}]
    batches = open_data(items, (InputSpec("x", F32, (None, None)),)).batches()
    assert [batch["x"].shape for batch in batches] == [(3, 4), (2, 6)]


def test_numbered_files_beside_one_constant_file(tmp_path):
    for k in range(3):
        np.save(tmp_path / f"x_{k}.npy", rows_of(4, seed=k))
    np.save(tmp_path / "sr.npy", np.int64(8000))
    batches = list(open_data(tmp_path, RATE).batches())
    assert [batch["x"].shape for batch in batches] == [(12, 4)] and batches[0]["sr"] == 8000


def test_batches_are_the_callers_own():
    source = rows_of(3)
    batch = next(open_data({"x": source}, (X,)).batches())
    batch["x"][:] = 7
    np.testing.assert_array_equal(source, rows_of(3))


def test_nan_and_infinite_rows_are_passed_on():
    rows = rows_of(5)
    rows[1, 2], rows[3, 0] = np.nan, np.inf
    np.testing.assert_array_equal(joined({"x": rows.astype(np.float64)}, (X,))["x"], rows)


# Names


@pytest.mark.parametrize(
    "arrays",
    [
        {"anything": rows_of(6)},
        {"features": rows_of(6), "labels": np.arange(6)},  # only one has the shape
        {"raw": np.zeros((6, 4), np.uint8), "scaled": rows_of(6)},  # only one is of floats
        {"X_train": rows_of(6), "x_test": np.zeros((6, 4), np.float32), "y": np.arange(6)},  # the usual key
    ],
)
def test_a_single_input_finds_its_array(arrays, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    np.testing.assert_array_equal(joined(tmp_path / "a.npz", (X,))["x"], rows_of(6))


def test_objects_beside_the_data_do_no_harm(tmp_path):
    np.savez(tmp_path / "a.npz", x=rows_of(6), notes=np.array([{"a": 1}, None], dtype=object))
    np.testing.assert_array_equal(joined(tmp_path / "a.npz", (X,))["x"], rows_of(6))


# Types


@pytest.mark.parametrize("given", ["u1", "i4", "i8", "f2", "f8", "?"])
@pytest.mark.parametrize("wanted", ["f2", "f4", "f8", "i4", "i8", "u1"])
def test_conversions_that_keep_the_values(given, wanted):
    values = np.array([[0, 1, 1, 0], [1, 0, 1, 1]]).astype(given)
    got = joined({"x": values}, (InputSpec("x", np.dtype(wanted), ("N", 4)),))["x"]
    np.testing.assert_array_equal(got, values.astype(wanted))


@pytest.mark.parametrize(
    "value, wanted, words",
    [
        (0.5, "i8", "takes whole numbers"),
        (np.nan, "i8", "takes whole numbers"),
        (300, "u1", "0 to 255"),
        (-1, "u1", "-1"),
        (2**40, "i4", str(2**40)),
        (1e30, "i8", "takes int64"),
        (2, "?", "0 to 1"),
        (1e6, "f2", "too large"),
        (np.uint16(65535), "f2", "too large"),
        (1e300, "f4", "too large"),
        ("a", "f4", "is of type text"),
        (1j, "f4", "complex128"),
        (np.datetime64("2020-01-01"), "f4", "datetime64"),
        (1.0, "O", "float64"),
    ],
)
def test_conversions_that_would_change_a_value_are_refused(value, wanted, words):
    message = refusal({"x": np.full((2, 4), value)}, (InputSpec("x", np.dtype(wanted), ("N", 4)),))
    assert words in message and "'x'" in message


def test_text_inputs(tmp_path):
    words = np.array([["ab"], ["ç"]])
    for given in (words, words.astype(object), np.char.encode(words, "utf-8")):
        assert joined({"words": given}, (TEXT,))["words"].tolist() == words.tolist()
    (tmp_path / "a.csv").write_text("words,n\nab,1\nç,2\n", encoding="utf-8")
    inputs = (TEXT, InputSpec("n", F32, ("N", 1)))
    got = joined(tmp_path / "a.csv", inputs)
    assert got["words"].tolist() == words.tolist() and got["n"].tolist() == [[1], [2]]
    assert "NoneType" in refusal({"words": np.array([["a"], [None]], dtype=object)}, (TEXT,))


def test_bfloat16_test_data_become_float32(tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = rows_of(6).astype(ml_dtypes.bfloat16)
    write_tensor(tmp_path / "input_0.pb", values)
    np.testing.assert_array_equal(joined(tmp_path, (X,))["x"], values.astype(np.float32))


# Tables


def test_csv_columns_named_as_inputs_keep_large_integers(tmp_path):
    big = 2**60 + 1  # not a float64
    (tmp_path / "a.csv").write_text(f"note,ids,v\nfirst,{big},1.5\nsecond,2,\n")
    got = joined(tmp_path / "a.csv", (InputSpec("ids", I64, ("N",)), InputSpec("v", F32, ("N", 1))))
    assert got["ids"].tolist() == [big, 2]
    np.testing.assert_array_equal(got["v"], np.array([[1.5], [np.nan]]))  # an empty cell is a missing value


def test_csv_rows_take_the_trailing_shape(tmp_path):
    (tmp_path / "a.csv").write_text("1,2,3,4\n5,6,7,8\n")
    got = joined(tmp_path / "a.csv", (InputSpec("x", F32, ("N", 1, 2, 2)),))["x"]
    np.testing.assert_array_equal(got, np.arange(1, 9, dtype=np.float32).reshape(2, 1, 2, 2))


def test_csv_longer_than_a_chunk(tmp_path):
    values = np.arange(200_000 * 4).reshape(-1, 4)
    np.savetxt(tmp_path / "a.csv", values, fmt="%d", delimiter=",")
    data = open_data(tmp_path / "a.csv", (InputSpec("x", np.float64, ("N", 4)),))
    assert data.rows == len(values)
    np.testing.assert_array_equal(np.concatenate([b["x"] for b in data.batches(4096)]), values)


def test_parquet_nulls_nested_lists_and_pandas_index(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    nested = rows_of(5, 2, 3)
    table = pa.table({"x": pa.array(nested.tolist(), pa.list_(pa.list_(pa.float32(), 3)))})
    pq.write_table(table, tmp_path / "nested.parquet")
    got = joined(tmp_path / "nested.parquet", (InputSpec("x", F32, ("N", 2, 3)),))["x"]
    np.testing.assert_array_equal(got, nested)
    table = pa.table({"a": [1.0, None], "b": [3, 4], "__index_level_0__": [0, 1]})
    pq.write_table(table, tmp_path / "flat.parquet")
    got = joined(tmp_path / "flat.parquet", (InputSpec("x", F32, ("N", 2)),))["x"]
    np.testing.assert_array_equal(got, np.array([[1, 3], [np.nan, 4]], np.float32))


# Images


def write_images(folder: Path, sizes=((8, 6), (8, 6), (5, 9)), mode="RGB") -> list[np.ndarray]:
    Image = pytest.importorskip("PIL.Image")
    pixels = []
    for k, size in enumerate(sizes):
        channels = () if mode == "L" else (3,)
        pixels.append(np.random.default_rng(k).integers(0, 256, (*size, *channels), dtype=np.uint8))
        path = folder / f"class{k % 2}" / f"{k}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels[-1]).save(path)
    return pixels[::2] + pixels[1::2]  # in the order of the names


def test_images_channels_first_scaled_and_normalised(tmp_path):
    pixels = write_images(tmp_path, [(8, 6)] * 3)
    expected = np.stack([p.transpose(2, 0, 1) for p in pixels]).astype(np.float64) / 255
    got = joined(tmp_path, (IMAGE,))["image"]
    np.testing.assert_allclose(got, expected, rtol=0, atol=2**-24)  # half a float32 ulp at 1
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    got = joined(tmp_path, (IMAGE,), preparation=Preparation(ImageOptions(mean, std)))["image"]
    expected_normal = (expected - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    # three roundings of numbers <= 1 before the division by 0.22, one of a number < 4 after it
    np.testing.assert_allclose(got, expected_normal, rtol=0, atol=4 * 2**-24 / 0.224 + 4 * 2**-24)
    got = joined(tmp_path, (IMAGE,), preparation=Preparation(ImageOptions((0.5,), (0.5,))))["image"]
    np.testing.assert_allclose(got, expected * 2 - 1, rtol=0, atol=4 * 2**-24)
    assert open_data(tmp_path, (IMAGE,)).rows == 3
    assert open_data(tmp_path, (IMAGE,)).description == "folder of 3 images"


def test_images_channels_last_uint8_untouched(tmp_path):
    pixels = write_images(tmp_path, [(8, 6)] * 3)
    got = joined(tmp_path, (InputSpec("image", np.uint8, ("N", 8, 6, 3)),), batch_size=2)["image"]
    np.testing.assert_array_equal(got, np.stack(pixels))


def test_images_are_resized_whole_and_bilinearly(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    pixels = write_images(tmp_path)
    got = joined(tmp_path, (InputSpec("image", np.uint8, (1, 3, 4, 5)),))["image"]
    for row, image in zip(got, pixels, strict=True):
        expected = np.asarray(Image.fromarray(image).resize((5, 4), Image.BILINEAR))
        np.testing.assert_array_equal(row, expected.transpose(2, 0, 1))
    flat = np.full((12, 10, 3), 77, np.uint8)  # independent of Pillow: a constant image stays constant
    Image.fromarray(flat).save(tmp_path / "z.bmp")
    got = joined(tmp_path / "z.bmp", (InputSpec("image", np.uint8, (1, 3, 4, 5)),))["image"]
    assert np.all(got == 77)


def test_images_of_dynamic_size_are_batched_by_size(tmp_path):
    pixels = write_images(tmp_path)  # in name order 8×6, 5×9, 8×6
    batches = list(open_data(tmp_path, (InputSpec("image", np.uint8, ("N", "H", "W", 3)),)).batches())
    assert [batch["image"].shape for batch in batches] == [(1, *image.shape) for image in pixels]
    write_images(tmp_path, [(8, 6)] * 3)
    batches = list(open_data(tmp_path, (InputSpec("image", np.uint8, ("N", 3, "H", "W")),)).batches())
    assert [batch["image"].shape for batch in batches] == [(3, 3, 8, 6)]


def test_images_grey_and_colour_follow_the_channel_count(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    grey = np.arange(48, dtype=np.uint8).reshape(8, 6)
    Image.fromarray(grey).save(tmp_path / "a.png")
    got = joined(tmp_path, (InputSpec("image", np.uint8, (None, 3, 8, 6)),))["image"]
    np.testing.assert_array_equal(got[0], np.stack([grey] * 3))
    got = joined(tmp_path, (InputSpec("image", np.uint8, (None, 1, 8, 6)),))["image"]
    np.testing.assert_array_equal(got[0, 0], grey)
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "a.png")  # 16 bits
    got = joined(tmp_path, (InputSpec("image", np.uint8, (None, 1, 8, 6)),))["image"]
    np.testing.assert_array_equal(got[0, 0], grey)


# Memory


@pytest.mark.parametrize("save", [np.save, np.savez, np.savez_compressed])
def test_large_arrays_are_streamed(save, tmp_path):
    rows = np.zeros((200_000, 64), np.float32)  # 51 MB
    rows[:, 0] = np.arange(len(rows))
    path = tmp_path / ("a.npy" if save is np.save else "a.npz")
    save(path, rows)
    total, expected = 0, int(rows[:, 0].sum(dtype=np.float64))
    del rows
    tracemalloc.start()
    try:
        for batch in open_data(path, (InputSpec("x", F32, ("N", 64)),)).batches(256):
            total += int(batch["x"][:, 0].sum(dtype=np.float64))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == expected
    assert peak < 2e6  # a batch is 65 kB, and zipfile keeps a buffer of a few


def test_a_second_pass_over_a_generator_does_not_keep_it_in_memory():
    items = ({"x": np.full((1000, 64), k, np.float32)} for k in range(200))  # 51 MB in all
    tracemalloc.start()
    try:
        data = open_data(items, (InputSpec("x", F32, ("N", 64)),))
        sums = [sum(float(batch["x"][:, 0].sum()) for batch in data.batches()) for _ in range(2)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sums == [1000 * 199 * 200 / 2] * 2
    assert peak < 3e6


# Refusals: a writer, the inputs, and what the sentence must say


def saved(name, **arrays):
    def write(folder):
        np.savez(folder / name, **arrays)
        return folder / name

    return write


def text(name, content):
    def write(folder):
        (folder / name).write_text(content)
        return folder / name

    return write


def binary(name, content):
    def write(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def loader(body, function="load"):
    def write(folder):
        (folder / "load.py").write_text("import numpy as np\n" + body)
        return f"{folder / 'load.py'}:{function}"

    return write


def capital_loader(folder):
    (folder / "LOAD.PY").write_text("load = list\n")
    return f"{folder / 'LOAD.PY'}:load"


def truncated(write, keep=0.6):
    def cut(folder):
        path = Path(write(folder))
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * keep)])
        return path

    return cut


def flipped(folder):
    """A .npz whose body does not agree with its checksum."""
    path = saved("a.npz", x=rows_of(500))(folder)
    content = bytearray(path.read_bytes())
    content[4000] ^= 0xFF
    path.write_bytes(content)
    return path


def lying_header(folder):
    """A .npz member that announces more rows than it has."""
    body = io.BytesIO()
    np.save(body, rows_of(10))
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("x.npy", body.getvalue().replace(b"(10, 4)", b"(99, 4)"))
    return folder / "a.npz"


def objects(folder):
    np.save(folder / "a.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    return folder / "a.npy"


def records(folder):
    np.save(folder / "a.npy", np.zeros(3, dtype=[("a", "f4"), ("b", "i4")]))
    return folder / "a.npy"


def image_file(folder):
    write_images(folder, [(64, 64)])
    return folder / "class0" / "0.png"


def image_as(kind):
    """An image of another format than its name says."""

    def write(folder):
        from PIL import Image

        Image.new("RGB", (64, 64)).save(folder / "0.png", kind)
        return folder / "0.png"

    return write


def image_folder(folder):
    write_images(folder)
    return folder


def mixed_folder(folder):
    np.save(folder / "labels.npy", np.arange(3))
    return image_folder(folder)


def npy_folder(**arrays):
    def write(folder):
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        return folder

    return write


def parquet(**columns):
    def write(folder):
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table(columns), folder / "a.parquet")
        return folder / "a.parquet"

    return write


REFUSED = {
    "no such file": (lambda f: f / "none.npy", (X,), ["no file or folder", "none.npy"]),
    "a near miss": (lambda f: write_npy(f).with_name("aa.npy"), (X,), ["did you mean", "a.npy"]),
    "unknown kind": (text("a.xlsx", ""), (X,), ["a.xlsx", ".parquet"]),
    "python without function": (text("load.py", ""), (X,), ["load.py:function"]),
    "a number": (lambda f: 3, (X,), ["int"]),
    "no inputs": (in_dict, (), ["no inputs"]),
    "empty folder": (lambda f: f, (X,), ["no data", ".npz", ".png"]),
    "mixed folder": (mixed_folder, (IMAGE,), ["mixes", "1 .npy file", "3 images"]),
    "wrong width": (saved("a.npz", x=rows_of(3, 5)), (X,), ["a.npz", "(3, 5)", "float32 (N, 4)"]),
    "wrong rank": (saved("a.npz", x=rows_of(3, 2, 4)), (X,), ["(3, 2, 4)", "float32 (N, 4)"]),
    "wrong width in a folder": (npy_folder(a=rows_of(3), b=rows_of(3, 5)), (X,), ["b.npy", "(3, 5)"]),
    "constant of a wrong shape": (saved("a.npz", x=rows_of(3), sr=np.arange(2)), RATE, ["(2,)", "int64 ()"]),
    "missing input": (saved("a.npz", x=rows_of(3), idz=np.arange(3)), TWO, ["'x', 'idz'", "'idz' to 'ids'"]),
    "missing input in a folder": (npy_folder(x=rows_of(3), idz=np.arange(3)), TWO, ["'idz' to 'ids'"]),
    "missing number in a folder": (npy_folder(x_0=rows_of(3), ids_1=np.arange(3)), TWO, ["'ids'", "x_0.npy"]),
    "one .npy for two inputs": (write_npy, TWO, ["'x', 'ids'", "'a'"]),
    "ambiguous keys": (saved("a.npz", a=rows_of(3), b=rows_of(3)), (X,), ["several arrays", "'a'", "'b'"]),
    "no key fits": (saved("a.npz", a=rows_of(3, 5), b=np.arange(3)), (X,), ["no array", "float32 (3, 5)"]),
    "rows differ": (saved("a.npz", x=rows_of(3), ids=np.arange(4)), TWO, ["'x' has 3", "'ids' has 4"]),
    "objects": (objects, (X,), ["a.npy", "Python objects"]),
    "objects in .npz": (saved("a.npz", x=np.array([{}, 1], dtype=object)), (X,), ["'x'", "Python objects"]),
    "records": (records, (X,), ["a.npy", "records"]),
    "empty .npy": (npy_folder(a=np.zeros((0, 4))), (X,), ["no rows"]),
    "empty .npz": (saved("a.npz", x=np.zeros((0, 4))), (X,), ["no rows"]),
    "empty csv": (text("a.csv", ""), (X,), ["no rows"]),
    "header only": (text("a.csv", "a,b,c,d\n"), (X,), ["no rows"]),
    "empty list": (lambda f: [], (X,), ["no rows"]),
    "empty loader": (loader("def load():\n    return []\n"), (X,), ["load.py:load", "no rows"]),
    "no full batch": (in_dict, (InputSpec("x", F32, (64, 4)),), ["23 rows", "64"]),
    "truncated .npy": (truncated(write_npy), (X,), ["a.npy", "cannot be read"]),
    "header cut": (truncated(write_npy, 0.1), (X,), ["a.npy", "cannot be read"]),
    "no bytes": (text("a.npy", ""), (X,), ["a.npy", "cannot be read"]),
    "truncated .npz": (truncated(write_npz), (X,), ["a.npz", "cannot be read"]),
    "flipped byte": (flipped, (X,), ["a.npz", "CRC"]),
    "lying header": (lying_header, (X,), ["a.npz", "(99, 4)"]),
    "truncated .pb": (truncated(write_pb), (X,), ["input_0.pb", "cannot be read"]),
    "empty .pb": (text("a.pb", ""), (X,), ["a.pb", "no tensor"]),
    "missing .pb": (lambda f: write_pb(f).parent, TWO, ["'ids'"]),
    "truncated parquet": (truncated(write_parquet), (X,), ["a.parquet", "cannot be read"]),
    "image of another format": (image_as("GIF"), (IMAGE,), ["0.png", "cannot be read", "cannot identify"]),
    "program as an image": (image_as("EPS"), (IMAGE,), ["0.png", "cannot be read", "cannot identify"]),
    "truncated image": (truncated(image_file), (IMAGE,), ["0.png", "cannot be read"]),
    "not an image": (text("a.jpg", "hello"), (IMAGE,), ["a.jpg", "cannot be read"]),
    "bad cell": (text("a.csv", "a,b,c,d\n1,2,3,4\n5,6,oops,8\n"), (X,), ["line 3, column 3 ('c')", "'oops'"]),
    "bad first cell": (text("a.csv", "1.5,2,oops,4\n5,6,7,8\n"), (X,), ["line 1", "column 3", "'oops'"]),
    "empty integer cell": (text("a.csv", "ids,v\n1,2\n,4\n"), (TWO[1],), ["line 3", "column 1"]),
    "column count": (text("a.csv", "1,2,3\n"), (X,), ["3 columns", "float32 (N, 4)", "4 per row"]),
    "ragged csv": (text("a.csv", "1,2,3,4\n1,2,3\n"), (X,), ["line 2", "3 columns"]),
    "csv without header": (text("a.csv", "1,2\n"), TWO, ["no header", "x, ids"]),
    "csv lacks an input": (text("a.csv", "x,idz\n1,2\n"), TWO, ["'ids'", "'idz' to 'ids'"]),
    "csv column for a vector": (text("a.csv", "x,ids\n1,2\n"), TWO, ["'x'", "float32 (N, 4)"]),
    "csv not text": (binary("a.csv", b"\xff\xfe\x00\x01"), (X,), ["a.csv", "cannot be read"]),
    "parquet column count": (parquet(a=[1.0], b=[2.0]), (X,), ["2 columns", "4 per row"]),
    "parquet list width": (parquet(x=[[1.0, 2.0]]), (X,), ["2 values per row", "float32 (N, 4)"]),
    "parquet ragged lists": (parquet(x=[[1.0] * 4, [1.0] * 3]), (X,), ["'x'", "3 and of 4"]),
    "parquet null list": (parquet(x=[[1.0] * 4, None]), (X,), ["'x'", "null"]),
    "parquet lacks an input": (parquet(x=[[1.0] * 4], idz=[1]), TWO, ["'ids'", "'idz'"]),
    "parquet two lists": (parquet(a=[[1.0] * 4], b=[[1.0] * 4]), (X,), ["'a', 'b'"]),
    "images for two inputs": (image_folder, (IMAGE, X), ["one input", "'image', 'x'"]),
    "layout unknown": (image_folder, (InputSpec("image", F32, (None,) * 4),), ["(?, ?, ?, ?)", "C, H, W"]),
    "images for rows": (image_folder, (X,), ["(N, 4)"]),
    "images for int8": (image_folder, (InputSpec("image", np.int8, (1, 3, 8, 6)),), ["int8"]),
    "loader file missing": (lambda f: f"{f / 'none.py'}:load", (X,), ["none.py"]),
    "loader file of another suffix": (capital_loader, (X,), ["LOAD.PY is not a Python file"]),
    "loader function missing": (loader("def loads(): pass\n"), (X,), ["no function 'load'", "load.py:loads"]),
    "loader does not import": (loader("import no_such_module_anywhere\n"), (X,), ["ModuleNotFoundError"]),
    "loader leaves": (loader("import sys\nsys.exit(0)\n"), (X,), ["ended the program", "sys.exit"]),
    "loader leaves when called": (loader("def load(): exit(0)\n"), (X,), ["ended the program"]),
    "loader leaves on the way": (
        loader("def load():\n    yield {'x': np.zeros((2, 4))}\n    raise SystemExit\n"),
        (X,),
        ["ended the program"],
    ),
    "loader leaves as an array": (
        loader("class A:\n    def numpy(self): exit(0)\nload = lambda: [{'x': A()}]"),
        (X,),
        ["'x' is not an array"],
    ),
    "loader returns nothing": (loader("def load(): pass\n"), (X,), ["NoneType"]),
    "loader yields arrays": (loader("load = lambda: [np.zeros((2, 4))]"), (X,), ["item 0", "not a dict"]),
    "loader yields ragged": (loader("load = lambda: [{'x': [[1], [1, 2]]}]"), (X,), ["item 0", "'x'"]),
    "loader of wrong shape": (loader("load = lambda: [{'x': np.zeros((2, 5))}]"), (X,), ["item 0", "(2, 5)"]),
    "batch sizes disagree": (
        lambda f: {"x": rows_of(6), "y": rows_of(6)},
        (InputSpec("x", F32, (1, 4)), InputSpec("y", F32, (3, 4))),
        ["batches of 1 and of 3"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_was_expected_and_what_came(case, tmp_path):
    write, inputs, words = REFUSED[case]
    message = refusal(write(tmp_path), inputs)
    for word in words:
        assert word in message


def test_errors_of_a_loader_are_chained(tmp_path):
    source = loader("def load():\n    yield {'x': np.zeros((2, 4))}\n    raise KeyError('lost')\n")(tmp_path)
    data = open_data(source, (X,))
    with pytest.raises(UserError, match="KeyError: 'lost'") as caught:
        list(data.batches())
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_generator_that_failed_fails_again():
    def items():
        yield {"x": rows_of(2)}
        raise RuntimeError("lost")

    data = open_data(items(), (X,))
    for _ in range(2):
        with pytest.raises(UserError, match="lost"):
            list(data.batches())


@pytest.mark.parametrize(
    "options, words",
    [
        (ImageOptions(mean=(0.1, 0.2)), ["2 values", "3 channels"]),
        (ImageOptions(mean=(123.7, 116.3, 103.5)), ["between 0 and 1", "by 255"]),
        (ImageOptions(std=(0.0,)), ["0 < std"]),
    ],
)
def test_image_options_are_checked(options, words, tmp_path):
    message = refusal(image_folder(tmp_path), (IMAGE,), preparation=Preparation(options))
    assert all(word in message for word in words)
    pixels = InputSpec("image", np.uint8, (1, 3, 8, 6))
    message = refusal(tmp_path, (pixels,), preparation=Preparation(ImageOptions(mean=(0.5,))))
    assert "do not apply" in message


@pytest.mark.parametrize(
    "module, write, inputs, hint",
    [
        ("PIL", image_folder, (IMAGE,), "gapa-onnx[images]"),
        ("pyarrow.parquet", parquet(x=[[1.0] * 4]), (X,), "gapa-onnx[parquet]"),
    ],
)
def test_a_missing_extra_is_named(module, write, inputs, hint, tmp_path, monkeypatch):
    source = write(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    assert hint in refusal(source, inputs)


def test_the_last_colon_splits_a_loader(tmp_path):
    folder = tmp_path / "C:"
    folder.mkdir()
    source = loader("def load():\n    yield {'x': np.ones((2, 4))}\n")(folder)
    assert joined(source, (X,))["x"].shape == (2, 4)


def test_loader_modules_are_private_and_see_their_neighbours(tmp_path):
    (tmp_path / "neighbour_of_loader.py").write_text("WIDTH = 4\n")
    body = "from neighbour_of_loader import WIDTH\ndef load():\n    return {'x': np.ones((2, WIDTH))}\n"
    before, other = list(sys.path), sys.modules.get("load")  # which is of a benchmark, if anything
    assert joined(loader(body)(tmp_path), (X,))["x"].shape == (2, 4)
    assert sys.path == before and sys.modules.get("load") is other


def test_the_batch_size_is_checked():
    with pytest.raises(UserError, match="batch size"):
        open_data(in_dict(None), TWO).batches(0)


def test_onnxruntime_reader():
    calibrate = pytest.importorskip("onnxruntime.quantization.calibrate")

    class Own(calibrate.CalibrationDataReader):
        def __init__(self):
            self.left = 3

        def get_next(self):
            self.left -= 1
            return {"x": np.full((2, 4), self.left, np.float32)} if self.left >= 0 else None

    data = open_data(Own(), (X,))
    for _ in range(2):
        assert [row[0] for batch in data.batches(4) for row in batch["x"]] == [2, 2, 1, 1, 0, 0]


def test_tensors_named_after_the_input_are_preferred(tmp_path):
    write_tensor(tmp_path / "test_data_set_0" / "input_0.pb", np.zeros((3, 9), np.float32), "weights")
    write_tensor(tmp_path / "test_data_set_0" / "input_1.pb", rows_of(6), "x")
    np.testing.assert_array_equal(joined(tmp_path, (X,))["x"], rows_of(6))
