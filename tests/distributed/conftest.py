"""The processes that the tests of this folder share, and the kind of ranks that is written here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool import Pool

sys.path.insert(0, str(Path(__file__).parent))  # of the pool's processes too, which get this path


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
