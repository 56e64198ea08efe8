"""Many clients that ask one server at once, and compare each answer with what it has to be."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

DTYPES = {"FP32": np.float32, "FP64": np.float64, "INT64": np.int64, "BOOL": np.bool_}
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Question:
    """A request, and the bytes of each output of its answer; None where these are not compared."""

    body: bytes
    expected: dict[str, bytes] | None


@dataclass
class Load:
    """What came back."""

    answered: int = 0
    unequal: int = 0
    failed: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def quantile(self, q: float) -> float:
        """Milliseconds."""
        return float(1000 * np.quantile(self.latencies, q)) if self.latencies else float("nan")


def question(rows: np.ndarray, outputs: Sequence[str], expected: dict[str, np.ndarray] | None) -> Question:
    data = rows.ravel().tolist()
    tensor = {"name": "pixels", "datatype": "FP32", "shape": list(rows.shape), "data": data}
    body = {"inputs": [tensor], "outputs": [{"name": name} for name in outputs]}
    wanted = None if expected is None else {name: expected[name].tobytes() for name in outputs}
    return Question(json.dumps(body).encode(), wanted)


def ask(url: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """The status and the JSON of one answer."""
    connection = _connected(url)
    connection.request("POST", "/v2/models/digits/infer", body, headers or JSON)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    try:
        return answer.status, json.loads(text)
    except ValueError:
        return answer.status, text.decode(errors="replace")


def decoded(answer: Any) -> dict[str, np.ndarray]:
    return {
        one["name"]: np.array(one["data"], DTYPES[one["datatype"]]).reshape(one["shape"])
        for one in answer["outputs"]
    }


def hammer(
    url: str, questions: Sequence[Question], clients: int, requests: int | None = None, seconds: float = 1e9
) -> Load:
    """Ask from so many clients at once, so many times in all, or for so long."""
    total, lock = Load(), threading.Lock()
    start = time.monotonic()
    left = iter(range(requests if requests is not None else 1 << 62))

    def client() -> None:
        own, connection = Load(), _connected(url)
        while time.monotonic() - start < seconds:
            with lock:
                number = next(left, None)
            if number is None:
                break
            one = questions[number % len(questions)]
            before = time.monotonic()
            status, text = _answer(connection, one.body)
            if status is None:  # a server may end a connection that nobody has used for seconds
                connection.close()
                status, text = _answer(connection, one.body)
            own.latencies.append(time.monotonic() - before)
            own.answered += 1
            if status != 200:
                own.failed += 1
            elif one.expected is not None:
                found = {name: array.tobytes() for name, array in decoded(json.loads(text)).items()}
                own.unequal += found != one.expected
        connection.close()
        with lock:
            total.answered += own.answered
            total.unequal += own.unequal
            total.failed += own.failed
            total.latencies += own.latencies

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total.seconds = time.monotonic() - start
    return total


def _answer(connection: http.client.HTTPConnection, body: bytes) -> tuple[int | None, bytes]:
    """Status and text; None for a connection that was cut."""
    try:
        connection.request("POST", "/v2/models/digits/infer", body, JSON)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return None, b""


def _connected(url: str) -> http.client.HTTPConnection:
    place = urlsplit(url)
    return http.client.HTTPConnection(str(place.hostname), place.port, timeout=120)
