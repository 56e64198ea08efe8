"""A folder as the model builder of onnxruntime-genai leaves one: a tiny decoder of random weights whose attention is
GroupQueryAttention, its configuration, and the files of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gapa_onnx.arrays import Array
from support.texts import decoder_tokenizer

WIDTH, INNER, HEADS, KEY_HEADS = 64, 96, 4, 2
HEAD = WIDTH // HEADS  # the operator takes multiples of 16
VOCABULARY = 280  # of the tokenizer that goes along
LONGEST = 128  # tokens of a sequence
END = "<|endoftext|>"

#: What of a block stands in one line each: output = operator(inputs).
_BLOCK = """
n{i} = SimplifiedLayerNormalization(x{i}, norm{i})
q{i} = MatMul(n{i}, wq{i})
k{i} = MatMul(n{i}, wk{i})
v{i} = MatMul(n{i}, wv{i})
c{i}, present.{i}.key, present.{i}.value = GroupQueryAttention(q{i}, k{i}, v{i}, past_key_values.{i}.key, \
past_key_values.{i}.value, lengths, total, cos, sin)
o{i} = MatMul(c{i}, wo{i})
a{i} = Add(x{i}, o{i})
m{i} = SimplifiedLayerNormalization(a{i}, inner_norm{i})
g{i} = MatMul(m{i}, gate{i})
s{i} = Sigmoid(g{i})
w{i} = Mul(g{i}, s{i})
u{i} = MatMul(m{i}, up{i})
p{i} = Mul(w{i}, u{i})
d{i} = MatMul(p{i}, down{i})
x{j} = Add(a{i}, d{i})
"""
_START = """
sums = ReduceSum(attention_mask, axis1)
ends = Sub(sums, axis1)
lengths = Cast(ends)
shape = Shape(attention_mask)
size = Gather(shape, one)
total = Cast(size)
x0 = Gather(embed, input_ids)
"""
_END = """
last = SimplifiedLayerNormalization(x{i}, norm)
logits = MatMul(last, head)
"""
_ATTRIBUTES: dict[str, dict[str, object]] = {
    "SimplifiedLayerNormalization": {"axis": -1, "epsilon": 1e-5},
    "GroupQueryAttention": {"num_heads": HEADS, "kv_num_heads": KEY_HEADS, "do_rotary": 1},
    "Cast": {"to": TensorProto.INT32},
    "ReduceSum": {"keepdims": 1},
}


def grouped_decoder(blocks: int = 2, seed: int = 0) -> onnx.ModelProto:
    """input_ids, attention_mask, past_key_values.i.key and .value -> logits, present.i.key and .value."""
    text = _START + "".join(_BLOCK.format(i=i, j=i + 1) for i in range(blocks)) + _END.format(i=blocks)
    cache = ["batch", KEY_HEADS, "past", HEAD]
    held = [f"{i}.{part}" for i in range(blocks) for part in ("key", "value")]
    graph = helper.make_graph(
        [_node(line) for line in text.split("\n") if line],
        "decoder",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
            *(
                helper.make_tensor_value_info(f"past_key_values.{name}", TensorProto.FLOAT, cache)
                for name in held
            ),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCABULARY]),
            *(
                helper.make_tensor_value_info(
                    f"present.{name}", TensorProto.FLOAT, [*cache[:2], "total", HEAD]
                )
                for name in held
            ),
        ],
        [numpy_helper.from_array(array, name) for name, array in _weights(blocks, seed).items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _node(line: str) -> onnx.NodeProto:
    outputs, call = line.split(" = ")
    operator, inputs = call.rstrip(")").split("(")
    domain = "com.microsoft" if operator == "GroupQueryAttention" else ""
    names = [name.strip() for name in inputs.split(",")]
    first, *others = [name.strip() for name in outputs.split(",")]
    attributes = _ATTRIBUTES.get(operator, {})
    return helper.make_node(operator, names, [first, *others], name=first, domain=domain, **attributes)


def _weights(blocks: int, seed: int) -> dict[str, Array]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    for i in range(blocks):
        shapes |= {f"{name}{i}": (WIDTH, WIDTH) for name in ("wq", "wo")}
        shapes |= {f"{name}{i}": (WIDTH, KEY_HEADS * HEAD) for name in ("wk", "wv")}
        shapes |= {f"{name}{i}": (WIDTH, INNER) for name in ("gate", "up")} | {f"down{i}": (INNER, WIDTH)}
    generator = np.random.default_rng(seed)
    made = {
        name: (generator.standard_normal(shape) * (1.0 if name == "embed" else shape[0] ** -0.5)).astype(
            np.float32
        )
        for name, shape in shapes.items()
    }
    norms = ["norm", *(f"{kind}{i}" for i in range(blocks) for kind in ("norm", "inner_norm"))]
    made |= {name: generator.uniform(0.5, 1.5, WIDTH).astype(np.float32) for name in norms}
    turns = np.arange(LONGEST)[:, None] * 100.0 ** -(np.arange(HEAD // 2) / (HEAD // 2))
    made |= {"cos": np.cos(turns).astype(np.float32), "sin": np.sin(turns).astype(np.float32)}
    return made | {"axis1": np.array([1], np.int64), "one": np.array(1, np.int64)}


def configuration(blocks: int = 2, filename: str = "model.onnx") -> dict[str, object]:
    """The genai_config.json of that decoder."""
    caches = {
        f"{when}_{part}_names": f"{prefix}.%d.{part}"
        for when, prefix in (("past", "past_key_values"), ("present", "present"))
        for part in ("key", "value")
    }
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": filename,
        "head_size": HEAD,
        "hidden_size": WIDTH,
        "inputs": inputs | {name: text for name, text in caches.items() if name.startswith("past")},
        "outputs": {"logits": "logits"} | {n: text for n, text in caches.items() if n.startswith("present")},
        "num_attention_heads": HEADS,
        "num_hidden_layers": blocks,
        "num_key_value_heads": KEY_HEADS,
    }
    model = {"bos_token_id": 0, "context_length": LONGEST, "decoder": decoder, "eos_token_id": 0}
    model |= {"pad_token_id": 0, "type": "llama", "vocab_size": VOCABULARY}
    search = {"do_sample": False, "early_stopping": True, "max_length": LONGEST, "min_length": 0}
    search |= {
        "num_beams": 1,
        "past_present_share_buffer": True,
        "temperature": 1.0,
        "top_k": 1,
        "top_p": 1.0,
    }
    return {"model": model, "search": search}


def builder_folder(folder: Path, blocks: int = 2) -> Path:
    """Write such a folder; the path of its model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = grouped_decoder(blocks)
    path = folder / "model.onnx"
    onnx.save(model, path, save_as_external_data=True, location="model.onnx.data", size_threshold=1024)
    (folder / "genai_config.json").write_text(json.dumps(configuration(blocks), indent=4))
    decoder_tokenizer(VOCABULARY).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": END,
        "bos_token": END,
        "add_bos_token": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
