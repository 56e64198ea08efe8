"""The model as an application of Ray Serve, which answers the open inference protocol (V2)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from gapa_model import Model
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

HERE = Path(__file__).resolve().parent


@serve.deployment
class Served:
    def __init__(self) -> None:
        self.model = Model(HERE)

    async def __call__(self, request: Request) -> JSONResponse:
        about = f"/v2/models/{self.model.name}"
        if request.method == "GET" and request.url.path == about:
            return JSONResponse(self.model.metadata())
        if request.method == "GET" and request.url.path in ("/v2/health/ready", f"{about}/ready"):
            return JSONResponse({"ready": True})
        if request.method != "POST" or request.url.path != f"{about}/infer":
            return JSONResponse({"error": f"POST {about}/infer"}, 404)
        try:
            asked: Any = json.loads(await request.body())
            return JSONResponse(await asyncio.to_thread(self.model.infer, asked))
        except (ValueError, RecursionError) as error:  # no JSON, or a BadRequest
            return JSONResponse({"error": str(error)}, 400)


app = Served.bind()
