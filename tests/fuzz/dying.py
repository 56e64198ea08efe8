"""A worker for the tests of workers: it dies of 0 and never answers a negative number."""

from __future__ import annotations

import os
import time

from fuzz import workers


def case(number: int) -> int:
    if number == 0:
        os.abort()
    if number < 0:
        time.sleep(60)
    return number


if __name__ == "__main__":
    workers.serve(case)
