"""The model as a service of BentoML, which answers the open inference protocol (V2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bentoml
from bentoml.exceptions import InvalidArgument
from gapa_model import BadRequest, Model

HERE = Path(__file__).resolve().parent
ABOUT = f"/v2/models/{json.loads((HERE / 'gapa.json').read_text(encoding='utf-8'))['name']}"


@bentoml.service(traffic={"timeout": 60, "concurrency": 32})
class Served:
    def __init__(self) -> None:
        self.model = Model(HERE)

    @bentoml.api(route=f"{ABOUT}/infer")
    def infer(
        self,
        inputs: list[dict[str, Any]],
        outputs: list[dict[str, Any]] | None = None,
        id: str | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        try:
            return self.model.infer({"inputs": inputs, "outputs": outputs, "id": id})
        except BadRequest as error:
            raise InvalidArgument(str(error)) from error
