"""A folder for onnxruntime-genai: its own configuration with the native library in it, model, tokenizer, a client.

It is made from the folder that onnxruntime-genai's model builder left, which has the configuration and the tokenizer.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from gapa_onnx import __version__
from gapa_onnx.data import remembered
from gapa_onnx.data.tokenizer import tokenizer_file
from gapa_onnx.errors import DataWarning, UserError
from gapa_onnx.model.load import file_sha256
from gapa_onnx.packaging.converted import (
    ConvertedFile,
    external_files,
    library_file,
    model_files,
    without_weights,
)
from gapa_onnx.packaging.folder import File

CONFIGURATION = "genai_config.json"
TOKENIZER, TOKENIZER_SETTINGS = "tokenizer.json", "tokenizer_config.json"
UNCERTAINTY = "uncertainty.json"
LIBRARY_KEY = "custom_ops_library"  # of the session options; the file must lie in the folder of the model
_CLIENT = Path(__file__).parent / "clients" / "genai"  # of the checkout: clients/, beside cli/

#: What the model builder and tokenizers leave beside a model and generation may read.
_BESIDE = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.jinja",
    "*processor_config.json",
    "generation_config.json",
    "spiece.model",
    "sentencepiece*.model",
)
_VOCABULARIES = (
    TOKENIZER,
    "tokenizer.model",
    "vocab.*",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
)
#: What a decoder must have, by the configuration's name for it, and what that is where it says nothing.
_PORTS = (
    ("inputs", ("input_ids", "input_ids"), ("embeddings", "inputs_embeds")),
    ("inputs", ("past_key_names", "past_key_values.%d.key"), ("past_names", "past_%d")),
    ("outputs", ("logits", "logits")),
    ("outputs", ("present_key_names", "present.%d.key"), ("present_names", "present_%d")),
)


def contents(file: ConvertedFile, beside: Path, stack: str) -> list[File]:
    """All files of the folder; a UserError that names what is missing."""
    if not file.record.states:
        raise UserError(
            f"{file.path} is not a decoder with a cache of keys and values, which onnxruntime-genai generates with",
            "export the model with the model builder of onnxruntime-genai, and convert that",
        )
    configuration = _configuration(beside)
    decoder = _decoder(configuration, beside)
    _require_source(file, beside / str(decoder["filename"]))
    _require_ports(file, decoder)
    library = library_file()
    made = [
        File(CONFIGURATION, "what onnxruntime-genai reads first", _served(configuration, file, library.name)),
        *model_files(file),
        library,
        *_other_models(configuration, beside),
        *_beside(file, beside),
        File(UNCERTAINTY, "the names of what says how far to trust a token", _uncertainty(file, decoder)),
        File("generate.py", "an example: generates, and colours each token", _CLIENT / "generate.py"),
        File("README.md", "how to use this folder", _readme(file, library.name)),
    ]
    return list({entry.name: entry for entry in reversed(made)}.values())[::-1]


# ------------------------------------------------------------------ the configuration


def _configuration(beside: Path) -> dict[str, Any]:
    path = beside / CONFIGURATION
    if not path.is_file():
        raise UserError(
            f"there is no {CONFIGURATION} in {beside}",
            "give the folder that onnxruntime-genai's model builder wrote with `beside`",
        )
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not JSON: {error}", "build the model again with onnxruntime-genai"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error
    if not isinstance(plain, dict):
        raise UserError(f"{path} is not a configuration of onnxruntime-genai", "it is one JSON object")
    return plain


def _decoder(configuration: Mapping[str, Any], beside: Path) -> Mapping[str, Any]:
    """The part that tells of the decoder."""
    model = configuration.get("model")
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(decoder, dict) or not isinstance(decoder.get("filename"), str):
        pipeline = isinstance(decoder, dict) and "pipeline" in decoder
        raise UserError(
            f"{beside / CONFIGURATION} "
            + (
                "cuts the decoder into several files"
                if pipeline
                else "names no decoder: it has no model.decoder.filename"
            ),
            "build the model as one file with the model builder of onnxruntime-genai",
        )
    for key in ("inputs", "outputs", "session_options"):
        if not isinstance(decoder.get(key, {}), dict):
            raise UserError(
                f"{beside / CONFIGURATION}: model.decoder.{key} is not an object",
                "build the model again with onnxruntime-genai",
            )
    if LIBRARY_KEY in decoder.get("session_options", {}):
        raise UserError(
            f"{beside / CONFIGURATION} loads a library already: {decoder['session_options'][LIBRARY_KEY]}",
            "onnxruntime-genai loads one library with a model; give the folder of the source model",
        )
    return decoder


def _require_source(file: ConvertedFile, source: Path) -> None:
    """UserError where the configuration lies beside another model than the one that was converted."""
    if source.is_file() and file_sha256(source) != file.record.source.sha256:
        raise UserError(
            f"{source} is not the model that {file.path} was converted from, so its configuration may not fit",
            "give the folder of the source model with `beside`",
        )


def _require_ports(file: ConvertedFile, decoder: Mapping[str, Any]) -> None:
    """UserError where the model does not take or give what the configuration says."""
    for side, *choices in _PORTS:
        present = file.names(outputs=side == "outputs")
        named = decoder.get(side, {})
        # what is named counts; where nothing is, onnxruntime-genai goes by the usual name
        wanted = [str(named[key]) for key, _ in choices if key in named] or [choices[0][1]]
        if not any(fnmatch.fnmatchcase(name, one.replace("%d", "*")) for one in wanted for name in present):
            raise UserError(
                f"{file.path} has no {side[:-1]} {wanted[0].replace('%d', '0')!r}, which {CONFIGURATION} speaks of",
                "give the folder of the source model with `beside`",
            )
    logits = str(decoder.get("outputs", {}).get("logits", "logits"))
    if logits not in file.record.heads:
        raise UserError(
            f"the output {logits!r} of {file.path} has no uncertainty", "convert with other `sites`"
        )


def _served(configuration: Mapping[str, Any], file: ConvertedFile, library: str) -> str:
    """The configuration with the converted file and the library in it."""
    made = copy.deepcopy(dict(configuration))
    decoder = made["model"]["decoder"]
    decoder["filename"] = file.path.name
    decoder["session_options"] = {**decoder.get("session_options", {}), LIBRARY_KEY: library}
    return json.dumps(made, indent=4, ensure_ascii=False) + "\n"


# ----------------------------------------------------------------- what lies beside it


def _other_models(configuration: Mapping[str, Any], beside: Path) -> Iterator[File]:
    """Files that the configuration names beside the decoder: encoders, embeddings, adapters, their settings."""
    for part, entry in configuration["model"].items():
        if part == "decoder" or not isinstance(entry, dict):
            continue
        for key in ("filename", "config_filename", "adapter_filename"):
            if isinstance(entry.get(key), str):
                yield from _named(entry[key], f"model.{part}.{key}", beside)


def _named(name: str, where: str, beside: Path) -> Iterator[File]:
    """A file that a configuration names, with its weights if it is a model."""
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise UserError(f"{where} of {CONFIGURATION} leads out of the folder: {name}", "put the file into it")
    if not (beside / name).is_file():
        raise UserError(f"there is no {name} in {beside}, which {where} names", "put it there")
    yield File(name, f"named by the configuration, {where}", beside / name)
    if name.endswith(".onnx"):
        for data in external_files(without_weights(beside / name)):
            yield File(
                str(PurePosixPath(name).parent / data),
                f"the weights of {name}",
                (beside / name).parent / data,
            )


def _beside(file: ConvertedFile, beside: Path) -> list[File]:
    """The tokenizer, and what else generation reads."""
    names = sorted(path.name for path in beside.iterdir() if path.is_file())
    found = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in _BESIDE)]
    if TOKENIZER_SETTINGS not in found:
        raise UserError(
            f"there is no {TOKENIZER_SETTINGS} in {beside}, which onnxruntime-genai needs",
            "put the files of the tokenizer there; they come with the weights of the model",
        )
    files = [File(name, "of the tokenizer and of generation", beside / name) for name in found]
    kept = remembered(file.record, file.metadata).tokenizer
    if kept is not None and TOKENIZER not in found:
        files.append(File(TOKENIZER, "the tokenizer, as the converted file keeps it", kept.text))
    elif not _has_vocabulary(found):
        raise UserError(
            f"there is no tokenizer in {beside}", f"put the {TOKENIZER} that belongs to the model there"
        )
    _warn_of_another_tokenizer(file, beside / TOKENIZER)
    return files


def _has_vocabulary(names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in _VOCABULARIES)


def _warn_of_another_tokenizer(file: ConvertedFile, path: Path) -> None:
    text = file.record.text
    if text is not None and path.is_file() and tokenizer_file(path).sha256 != text.tokenizer:
        warnings.warn(
            f"{path} is not the tokenizer that {file.path} was calibrated with, so ordinary text may look strange",
            DataWarning,
            stacklevel=2,
        )


# ------------------------------------------------------------------------- made for it


def _uncertainty(file: ConvertedFile, decoder: Mapping[str, Any]) -> str:
    """What a client asks `generator.get_output` for, by what it is."""
    logits = str(decoder.get("outputs", {}).get("logits", "logits"))
    head = file.record.heads[logits]
    flagged = {
        role: {
            "p_value": None if score.quantile is None else round(1 - score.quantile, 12),
            "score": score.threshold,
        }
        for role, score in head.scores.items()
    }
    return json.dumps({"of": logits, "outputs": dict(head.outputs), "flagged_at": flagged}, indent=4) + "\n"


def _readme(file: ConvertedFile, library: str) -> str:
    template = (_CLIENT / "README.md").read_text(encoding="utf-8")
    return template.format(
        name=file.path.name.split(".")[0],
        version=__version__,
        source=file.record.source.file or "a model in memory",
        library=library,
        platform=f"{platform.system()} on {platform.machine()}",
    )
