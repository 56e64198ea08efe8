"""The model as a runtime of MLServer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gapa_model import BadRequest, Model
from mlserver import MLModel
from mlserver.errors import InferenceError
from mlserver.types import InferenceRequest, InferenceResponse

HERE = Path(__file__).resolve().parent


class Served(MLModel):  # type: ignore[misc]
    async def load(self) -> bool:
        self.model = await asyncio.to_thread(Model, HERE)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        try:
            answer = await asyncio.to_thread(self.model.infer, payload.model_dump())
        except BadRequest as error:
            raise InferenceError(str(error)) from error
        return InferenceResponse(**answer)
