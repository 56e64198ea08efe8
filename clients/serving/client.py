"""Ask a server that speaks the open inference protocol (V2) over HTTP, and show what it says of each row.

python client.py                                     # made-up rows, to see that it works
python client.py --data rows.npy --url http://host:8000
python client.py --data inputs.npz                   # a model with several inputs, by their names
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

ABOUT = json.loads(Path(__file__).with_name("client.json").read_text(encoding="utf-8"))
INPUTS = ABOUT["inputs"]  # name, datatype and shape of each; -1 is free
DTYPES = {"FP16": "float16", "FP32": "float32", "FP64": "float64", "BOOL": "bool"}


def ask(url: str, name: str, arrays: dict[str, Any], outputs: list[str] | None = None) -> dict[str, Any]:
    """The answers to a batch, by output."""
    inputs = [_tensor(port, arrays[port["name"]]) for port in INPUTS]
    body: dict[str, Any] = {"inputs": inputs}
    if outputs:
        body["outputs"] = [{"name": output} for output in outputs]
    request = urllib.request.Request(
        f"{url}/v2/models/{name}/infer", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.loads(answer.read())
    return {
        entry["name"]: np.array(entry["data"], _dtype(entry["datatype"])).reshape(entry["shape"])
        for entry in told["outputs"]
    }


def _tensor(port: dict[str, Any], array: Any) -> dict[str, Any]:
    array = np.asarray(array).astype(_dtype(port["datatype"]))
    data = array.ravel()
    if array.dtype.kind == "f" and not np.isfinite(data).all():
        data = np.where(np.isfinite(data), data.astype(np.float64), None)  # JSON has no NaN
    return {**port, "shape": list(array.shape), "data": data.tolist()}


def _dtype(datatype: str) -> np.dtype:
    return np.dtype(DTYPES.get(datatype, "object" if datatype == "BYTES" else datatype.lower()))


def _made_up(port: dict[str, Any]) -> Any:
    sizes = [4 if place == 0 and size < 0 else max(size, 1) for place, size in enumerate(port["shape"])]
    return np.random.default_rng(0).normal(size=sizes).astype(_dtype(port["datatype"]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default=ABOUT["url"])
    parser.add_argument("--name", default=ABOUT["name"])
    parser.add_argument("--data", metavar="FILE", help="a .npy, or a .npz with an array for each input")
    given = parser.parse_args()
    if given.data is None:
        arrays = {port["name"]: _made_up(port) for port in INPUTS}
    else:
        loaded = np.load(given.data)
        arrays = {INPUTS[0]["name"]: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    try:
        answers = ask(given.url, given.name, arrays)
    except urllib.error.HTTPError as error:
        print(f"the server refuses this: {error.read().decode(errors='replace')}", file=sys.stderr)
        return 1
    except urllib.error.URLError as error:
        print(f"there is no answer from {given.url}: {error.reason}", file=sys.stderr)
        return 1
    for name, array in answers.items():
        print(f"{name} {array.dtype} {list(array.shape)}")
        print(np.array2string(array, threshold=40, precision=4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
