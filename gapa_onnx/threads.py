"""Threads where they help, and results that do not depend on their number.

FAISS and BLAS split a sum over threads, which changes its last bits; and products of small matrices take BLAS
several times as long on two threads as on one. So such work runs on one thread, and independent pieces of it side
by side.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import faiss  # noqa: F401  what is loaded when threads are first counted can be limited
import numpy as np  # noqa: F401
from threadpoolctl import ThreadpoolController

Piece = TypeVar("Piece")


@cache
def _pools() -> ThreadpoolController:
    return ThreadpoolController()


@contextmanager
def one_thread() -> Iterator[None]:
    """FAISS and BLAS on one thread within this."""
    with _pools().limit(limits=1):
        yield


def side_by_side(work: Callable[[Piece], None], pieces: Iterable[Piece]) -> None:
    """Independent pieces of work, each on one thread, on as many threads as there are cores."""

    @one_thread()  # OpenMP counts for each thread that calls it
    def alone(piece: Piece) -> None:
        work(piece)

    with one_thread(), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(alone, pieces))  # raises what a piece has raised
