"""The benchmarks of serving and of the drift test: clients notice wrong answers, and pages show what was found."""

from __future__ import annotations

import http.server
import importlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def load() -> Iterator[object]:
    sys.path[:0] = [str(BENCHMARKS / "serving"), str(BENCHMARKS)]
    yield importlib.import_module("load")
    del sys.path[:2]


@pytest.fixture
def server() -> Iterator[str]:
    """Answers twice what it is given; every fifth answer differs by the last bit, every seventh is an error."""
    lock, count = threading.Lock(), iter(range(1, 1 << 30))

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["inputs"][0]
            with lock:
                number = next(count)
            data = (2 * np.array(asked["data"], np.float32)).astype(np.float32)
            if number % 5 == 0:
                data[-1] = np.nextafter(data[-1], np.float32(9))
            told = {"outputs": [{**asked, "name": "y", "data": data.tolist()}]}
            body = json.dumps(told).encode()
            self.send_response(400 if number % 7 == 0 else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_clients_count_what_is_wrong(load, server: str):
    rows = [np.random.default_rng(n).normal(size=(n + 1, 3)).astype(np.float32) for n in range(4)]
    questions = [load.question(one, ["y"], {"y": 2 * one}) for one in rows]
    found = load.hammer(server, questions, clients=4, requests=70)
    assert (found.answered, found.failed) == (70, 10)
    assert found.unequal == 12  # every fifth, but for two that are errors as well
    assert len(found.latencies) == 70 and 0 < found.quantile(0.5) <= found.quantile(0.99)


def test_the_page_shows_what_was_found(load, tmp_path: Path):
    page = importlib.import_module("page")
    lap = {"per_second": 100.0, "p50_ms": 1.5, "p99_ms": 3.0}
    check = {"versions": {"ray": "2.0"}, "clients": 16, "requests": 10000, "unequal": 0, "failed": 0}
    check |= {"nan": "flagged", "wrong_shape": 400, "empty": [[0], [0]]}
    soak = {"minutes": 3, "requests": 5, "unequal": 0, "failed": 0, "resident_megabytes": list(range(10))}
    speed = {"source": [lap, lap], "converted": [lap, lap]}
    (tmp_path / "serving.json").write_text(
        json.dumps({"ray": {"check": check, "soak": soak, "speed": speed}})
    )
    text = page.serving(tmp_path / "serving.json")
    assert "| ray (ray 2.0) | 16 | 10,000 | 0 | 0 | flagged | HTTP 400 | empty answer |" in text
    assert "| ray | 3 | 5 | 0 | 0 | 0 | 4 | 9 |" in text and "100.0 / 100.0" in text

    benchmark = importlib.import_module("drift")
    alarms = benchmark.false_alarms(benchmark.in_steps, 50, 50, 2)
    assert alarms.streams == 2 and alarms.alarms <= 1
    late = benchmark.delay(benchmark.normal, lambda rng, n: benchmark.normal(rng, n) + 9, 50, 1.0, 0, 2)
    assert late.told == 2 and late.largest < 50
    found = {"level": 0.01, "scores": {"normal": {"alarms": [vars(alarms)], "delays": [vars(late)]}}}
    (tmp_path / "drift.json").write_text(json.dumps(found))
    assert "| normal | 50 | 2 | 10,000 |" in page.drift(tmp_path / "drift.json")
