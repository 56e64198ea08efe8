"""What a converted file remembers of how its data became inputs, so that later data become inputs in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from gapa_onnx.data.spec import Preparation
from gapa_onnx.data.tokenizer import METADATA_KEY, TokenizerFile, unpacked
from gapa_onnx.record import ImageRecord, Record, TextRecord, damaged


@dataclass(frozen=True)
class Remembered:
    """How images or text were given to a file when it was calibrated."""

    images: ImageRecord | None = None
    text: TextRecord | None = None
    tokenizer: TokenizerFile | None = field(default=None, repr=False)

    def complete(self, given: Preparation) -> Preparation:
        """What is given, with what is remembered in place of what that leaves open."""
        return Preparation(
            given.images.completed(self.images), given.text.completed(self.text, self.tokenizer)
        )


def remembered(record: Record | None, metadata: Mapping[str, str]) -> Remembered:
    """What a file with this record and these entries of its metadata remembers; nothing of any other model."""
    if record is None:
        return Remembered()
    kept = metadata.get(METADATA_KEY)
    if record.text is None or kept is None:
        return Remembered(record.images, record.text)
    file = TokenizerFile(unpacked(kept), record.text.file, record.text.file or "the tokenizer of the file")
    if file.sha256 != record.text.tokenizer:
        raise damaged("text.tokenizer is not the sha256 of the tokenizer that the file keeps")
    return Remembered(record.images, record.text, file)


def metadata(model: onnx.ModelProto) -> dict[str, str]:
    """The entries of a model's metadata."""
    return {entry.key: entry.value for entry in model.metadata_props}
