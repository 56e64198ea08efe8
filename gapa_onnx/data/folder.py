"""A folder of files: which kind they are, and which of them belong together."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from gapa_onnx.data import documents, images
from gapa_onnx.data.arrays import npy_stream, npz_bundle, tensor_bundles
from gapa_onnx.data.binding import missing_inputs
from gapa_onnx.data.bundle import Bundle, Reader
from gapa_onnx.data.spec import InputSpec, Preparation
from gapa_onnx.data.text import open_text
from gapa_onnx.errors import UserError
from gapa_onnx.record import TextRecord

ACCEPTED = (
    "a folder of .npy, .npz, ONNX test data (.pb), images (.png, .jpg, .jpeg, .bmp) or text (.txt, .jsonl)"
)
_KINDS = {
    **{suffix: suffix for suffix in (".npy", ".npz", ".pb")},
    **dict.fromkeys(images.EXTENSIONS, "image"),
    **dict.fromkeys(documents.EXTENSIONS, "text"),
}


def open_folder(
    folder: Path, inputs: Sequence[InputSpec], options: Preparation, recorded: TextRecord | None = None
) -> Reader:
    """The files of a folder and its sub-folders, all of one kind, in the order of their names."""
    by_kind: dict[str, list[Path]] = {}
    for path in _visible_files(folder):
        kind = _KINDS.get(path.suffix.lower())
        if kind and not (kind == ".pb" and path.name.startswith("output_")):
            by_kind.setdefault(kind, []).append(path)
    if len(by_kind) > 1:
        by_kind.pop("text", None)  # a README.txt beside the data
    if not by_kind:
        raise UserError(
            f"the folder {folder} holds no data that can be read",
            f"{ACCEPTED}; a .csv or .parquet is given itself",
        )
    if len(by_kind) > 1:
        kinds = " and ".join(_counted(kind, files) for kind, files in by_kind.items())
        raise UserError(
            f"the folder {folder} mixes {kinds}",
            "keep one kind of file per folder, so that it is clear what the data are",
        )
    ((kind, files),) = by_kind.items()
    description = f"folder of {_counted(kind, files)}"
    if kind == "text":
        return text_reader(files, str(folder), description, inputs, options, recorded)
    return open_files(kind, files, inputs, options, description, folder)


def open_files(
    kind: str,
    files: Sequence[Path],
    inputs: Sequence[InputSpec],
    options: Preparation,
    description: str,
    folder: Path | None = None,
) -> Reader:
    """Files of one kind (.npy, .npz, .pb or image) as one reader."""
    if kind == "image":
        layout = images.image_layout(inputs, options.images)
        images.require_pillow()
        return Reader(
            description,
            lambda: images.image_bundles(files, layout),
            count=lambda: len(files),
            files=tuple(files),
            images=layout.record,
        )
    if kind == ".npz":
        return Reader(description, lambda: map(npz_bundle, files))
    if kind == ".pb":
        return Reader(description, lambda: tensor_bundles(files, inputs))
    groups = _npy_groups(folder, files, inputs) if folder else [{path.stem: path} for path in files]
    return Reader(description, lambda: map(_npy_bundle, groups))


def text_reader(
    files: Sequence[Path],
    where: str,
    description: str,
    inputs: Sequence[InputSpec],
    options: Preparation,
    recorded: TextRecord | None,
) -> Reader:
    """Files of text as one reader."""
    text = open_text(files, where, inputs, options.text, recorded)
    most = options.text.tokens
    told = f"{description}, in sequences of {text.record.seq_len} tokens" + (
        "" if most is None else f" and {most:,} in all at most"
    )
    return Reader(told, text.bundles, count=text.kept.count, text=text)


def kind_of(path: Path) -> str | None:
    return _KINDS.get(path.suffix.lower())


def _visible_files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(root, name)


def _counted(kind: str, files: Sequence[Path]) -> str:
    plural = "s" if len(files) != 1 else ""
    if kind in ("image", "text"):
        return f"{len(files)} {'image' if kind == 'image' else 'text file'}{plural}"
    return f"{len(files)} {kind} file{plural}"


def _npy_groups(folder: Path, files: Sequence[Path], inputs: Sequence[InputSpec]) -> list[dict[str, Path]]:
    """Which .npy files make up a bundle.

    <input>_<k>.npy and <input>-<k>.npy are bundle k; <input>.npy is a bundle of its own, or a constant
    beside numbered files of the other inputs. With one input, files of any name are bundles, in order.
    """
    owned = [(path, *owner) for path in files if (owner := _owner(path, inputs)) is not None]
    if len(inputs) == 1:
        owned.sort(key=lambda entry: (entry[0].parent, -1 if entry[2] is None else entry[2]))  # 9 before 10
        return [{inputs[0].name: path} for path in ([path for path, _, _ in owned] or files)]
    groups = _by_number(folder, owned)
    for group in groups:
        missing = [spec.name for spec in inputs if spec.name not in group]
        if missing:
            company = f" (beside {next(iter(group.values())).name})" if group else ""
            raise missing_inputs(f"the folder {folder}{company}", missing, (path.stem for path in files[:20]))
    return groups


def _by_number(folder: Path, owned: Sequence[tuple[Path, str, int | None]]) -> list[dict[str, Path]]:
    """The files of each number in each folder, with those beside them that have none."""
    shared: dict[Path, dict[str, Path]] = {}
    bundles: dict[tuple[Path, int], dict[str, Path]] = {}
    for path, name, number in owned:
        beside = shared.setdefault(path.parent, {})
        group = beside if number is None else bundles.setdefault((path.parent, number), {})
        if name in group:
            raise UserError(
                f"the folder {path.parent} has two files for input '{name}': {group[name].name}, {path.name}",
                "number them apart",
            )
        group[name] = path
    return [
        group
        for parent, beside in (shared or {folder: {}}).items()
        for group in [beside | bundles[key] for key in sorted(bundles) if key[0] == parent] or [beside]
    ]


def _owner(path: Path, inputs: Sequence[InputSpec]) -> tuple[str, int | None] | None:
    """The input that a file is named after, and its number if it has one."""
    # "a/b:0" cannot be a file name, a_b_0 can
    plain = {re.sub(r"[^\w.\-]", "_", spec.name): spec.name for spec in inputs}
    if path.stem in plain:
        return plain[path.stem], None
    numbered = re.fullmatch(r"(.+)[_-](\d+)", path.stem)
    if numbered and numbered[1] in plain:
        return plain[numbered[1]], int(numbered[2])
    return None


def _npy_bundle(group: dict[str, Path]) -> Bundle:
    return Bundle(str(next(iter(group.values()))), {name: npy_stream(path) for name, path in group.items()})
