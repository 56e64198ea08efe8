"""The model for Triton's Python backend: what the onnxruntime backend gives, where only the Python backend is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import triton_python_backend_utils as pb_utils  # noqa: E402
from gapa_model import BadRequest, Model  # noqa: E402


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.model = Model(HERE)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            answers = self.model.run(given, list(request.requested_output_names()) or None)
        except BadRequest as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([pb_utils.Tensor(*pair) for pair in answers.items()])
